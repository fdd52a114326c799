"""The page of `shmbridge report`, in Chromium: curves and groups are drawn, no text of a run is markup."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from shmbridge.cli import main
from shmbridge.consumers.learner.report.samples import read_samples

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = '</script><script>document.title="owned"</script><img src=x onerror=document.title=1>'
STEPS = 30


def trajectory(score, tokens, advantages, **more):
    return {
        "completion": "".join(tokens),
        "score": score,
        "finish_reason": "stop",
        "tokens": tokens,
        "advantages": advantages,
    } | more


def sample(step, why="spread", env="maze", **more):
    rows = [
        trajectory(1.0, ["left ", "then ", "right"], [0.5, None, 1.0], step_rewards=[0.25], step_ends=[2]),
        trajectory(0.0, ["back", EVIL], [-0.5, -1.0]),
    ]
    return {
        "step": step,
        "why": why,
        "env_name": env,
        "group_id": f"{env}:{step}",
        "min_policy_version": step - 1,
        "max_policy_version": step - 1,
        "group_size": 2,
        "prompt": f"where to? {EVIL}",
        "trajectories": rows,
    } | more


def write_run(folder, name="run", samples=(), **more):
    run = folder / name
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            line = {"step": step, "time": 100.0 + step, "tokens": 1000, "reward_mean": step / STEPS}
            line |= {"loss": -0.1, "staleness_mean": 1.5, "staleness_max": 3, "logprob_diff_mean": 0.01}
            line |= {"wait_s": 0.6, "forward_s": 0.2, "backward_s": 0.2, "bridge/lanes_live": 2.0}
            line |= {"atropos/maze/mean_score": 0.2, "atropos/words/mean_score": None if step == 7 else 0.4}
            line |= {"bridge/lanes_dead": float(step > 20), "bridge/lane_fill_frac": 0.3}
            line |= {"bridge/drops_full_total": float(step // 10), "dropped_total": step // 10}
            file.write(json.dumps(line | {"discarded_total": 0} | more) + "\n")
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    (run / "config.yaml").write_text(f"run:\n  bridge: b1\n  model: '{EVIL}'\n  steps: 30\n")
    return run


class Page(HTMLParser):
    """The elements of a document: (tag, attributes, text inside), in order of their ends."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "br", "input"):
            self.open.append([tag, dict(attrs), ""])
        else:
            self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        for each in self.open:
            each[2] += data

    def handle_endtag(self, tag):
        if self.open and self.open[-1][0] == tag:
            self.found.append(tuple(self.open.pop()))

    def of(self, tag, kind=""):
        return [
            (attributes, text)
            for name, attributes, text in self.found
            if name == tag and set(kind.split()) <= set(attributes.get("class", "").split())
        ]


def report(*folders, out):
    assert main(["report", *map(str, folders), "--out", str(out)]) == 0
    return out / "report.html"


def in_chromium(file, profile, *more):
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}", "--dump-dom", *more]
    done = subprocess.run(
        [*command, file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HOME": str(profile)},
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Page(done.stdout), console


def test_the_page_in_chromium(tmp_path, capsys):
    samples = [
        sample(step, why, env)
        for step in (1, 10, 20)
        for why, env in (("spread", "maze"), ("random", "words"))
    ]
    file = report(write_run(tmp_path, samples=samples), out=tmp_path)
    assert f"page: {file}" in capsys.readouterr().out
    page, console = in_chromium(file, tmp_path)
    assert console == []
    ((root, _),) = page.of("html")
    assert root["data-ready"] == "true"
    charts = {attributes["data-chart"] for attributes, _ in page.of("figure")}
    wanted = {"Reward", "Loss", "Staleness", "Sampler against policy", "Throughput", "Where the time goes"}
    assert charts >= wanted | {"Lost records", "Lanes", "Fill of the lanes"}
    assert "NaN" not in " ".join(attributes.get("d", "") for attributes, _ in page.of("path"))
    # each environment has its line, each sampled group its button
    assert {"maze", "words"} <= set(
        re.findall(r"maze|words", " ".join(text for _, text in page.of("figure")))
    )
    ((_, buttons),) = page.of("div", "groups")
    assert buttons.count("step ") == 6
    assert "6 of 6 groups" in page.of("span", "count")[0][1]
    # the newest group is open: side by side, best first
    cards = page.of("article")
    assert [text[:1] for _, text in cards] == ["1", "0"]
    plus, minus = page.of("span", "token plus"), page.of("span", "token minus")
    told = [attributes for attributes, _ in plus if "title" in attributes]
    assert [attributes["title"] for attributes in told] == [
        "advantage +0.500, token 1",
        "advantage +1, token 3",
    ]
    strengths = [float(attributes["style"].split(":")[1].strip(" ;")) for attributes in told]
    assert 0.0 < strengths[0] < strengths[1]
    assert "step 1: +0.250" in cards[0][1]
    assert any(text == "then " for _, text in page.of("span", "token untrained"))
    # what would be markup is text
    assert any(text == EVIL for _, text in minus)
    assert EVIL in page.of("div", "prompt")[0][1]
    assert page.of("title")[0][1] == "run - shmbridge report"
    assert not page.of("img")
    assert len(page.of("script")) == 2


def test_a_token_has_its_colour_and_the_policy_stops_foreign_scripts(tmp_path):
    """Another script in the page reads colours; it runs only where the page's policy is taken away."""
    file = report(write_run(tmp_path, samples=[sample(1)]), out=tmp_path)
    probe = """<script>for (const kind of ["plus", "minus", "untrained"]) {
        const token = document.querySelector("article ." + kind);
        document.body.dataset[kind] = getComputedStyle(token).backgroundColor;
        }</script></body>"""
    text = file.read_text().replace("</body>", probe)
    file.write_text(text)
    page, console = in_chromium(file, tmp_path)
    assert "data-plus" not in page.of("body")[0][0]
    assert any("Content Security Policy" in line for line in console)
    file.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text))
    page, console = in_chromium(file, tmp_path)
    body = page.of("body")[0][0]
    assert console == []
    none = "rgba(0, 0, 0, 0)"
    assert body["data-untrained"] == none
    assert len({body["data-plus"], body["data-minus"], none}) == 3


def test_several_runs_share_one_page(tmp_path):
    folders = [write_run(tmp_path, name, samples=[sample(1)]) for name in ("first", "second")]
    page, console = in_chromium(report(*folders, out=tmp_path / "both"), tmp_path)
    assert console == []
    assert page.of("title")[0][1] == "first and second - shmbridge report"
    ((_, table),) = page.of("table")
    assert {"first", "second"} <= set(re.findall(r"first|second", table))
    assert "2 of 2 groups" in page.of("span", "count")[0][1]
    assert len(page.of("h3", "run")) == 2


def test_runs_in_folders_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    folders = [write_run(tmp_path / name, samples=[sample(1)]) for name in ("a", "b")]
    text = report(*folders, out=tmp_path).read_text()
    assert f"<title>{folders[0]} and {folders[1]} - shmbridge report</title>" in text


def test_the_page_is_one_file_that_loads_nothing_and_escapes_what_the_run_says(tmp_path):
    text = report(write_run(tmp_path, samples=[sample(1)]), out=tmp_path).read_text()
    assert EVIL not in text
    assert text.count("</script>") == 2
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(|fetch\(""", text)
    assert "default-src 'none'" in text
    assert "The learner waits for environments 60 % of the time" in text
    assert "2 dropped, full" in text or "3 dropped, full" in text


def test_a_run_without_samples_configuration_or_facts_has_a_page(tmp_path):
    run = write_run(tmp_path)
    (run / "samples.jsonl").unlink()
    (run / "config.yaml").write_text("{")
    assert "There are no samples" in report(run, out=tmp_path).read_text()


def test_samples_that_a_resume_took_back_count_once_and_torn_lines_are_counted(tmp_path):
    again = [sample(step, why) for step in (1, 10, 20, 10, 20) for why in ("spread", "random")]
    run = write_run(tmp_path, samples=again)
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"step": 30, "pro\n{"step": 31}\n[]\n')
        file.write(json.dumps(sample(32, trajectories=[trajectory(1.0, ["a"], [1.0, 2.0])])) + "\n")
    found = read_samples(run)
    assert [each["step"] for each in found.groups] == [1, 1, 10, 10, 20, 20]
    assert (found.left_out, found.torn) == (0, 4)


def test_more_samples_than_a_page_holds_are_spread_over_the_run(tmp_path):
    run = write_run(tmp_path, samples=[sample(step) for step in range(1, 101)])
    found = read_samples(run, most_bytes=20_000)
    steps = [each["step"] for each in found.groups]
    assert found.left_out == 100 - len(steps)
    assert 5 < len(steps) < 60
    assert steps[-1] > 90
    assert max(b - a for a, b in pairwise(steps)) <= 100 // len(steps) + 1


def test_numbers_that_no_page_can_hold_end_nothing(tmp_path, capsys):
    """json.loads reads Infinity and NaN, and recurses as deep as a line is nested."""
    odd = sample(2)
    odd["trajectories"][0] |= {"score": math.nan, "step_rewards": [math.inf, None], "step_ends": [1, 2]}
    odd["trajectories"][0]["advantages"][0] = math.inf
    folder = write_run(tmp_path, samples=[sample(1), odd, sample(1) | {"step": math.inf}])
    for name in ("samples.jsonl", "metrics.jsonl"):
        with (folder / name).open("a") as file:
            file.write("[" * 100_000 + "\n")
    assert main(["report", str(folder)]) == 0
    found = read_samples(folder)
    assert (len(found.groups), found.torn) == (2, 2)
    first = found.groups[1]["trajectories"][0]
    assert (first["score"], first["advantages"][0], first["step_rewards"]) == (None, None, [None, None])
