"""`shmbridge report`: the numbers of a run, what follows from them, its curves, and its page."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest

from shmbridge.cli import main
from shmbridge.consumers.learner.report import page
from shmbridge.consumers.learner.report.run import NoRun, as_text, read_run, summary
from shmbridge.consumers.learner.report.samples import read_samples

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = '</pre><script>document.title="owned"</script><img src=x onerror=document.title=1>'
BYTES = 400_000  # of a picture, however long the run


def line(step, **more):
    found = {"step": step, "time": 1000.0 + 2.0 * step, "tokens": 100, "reward_mean": 0.5, "loss": -0.1}
    found |= {"staleness_mean": 1.0, "staleness_max": 2, "update_skipped": False}
    found |= {"dropped_total": 0, "discarded_total": 0, "wait_s": 0.5, "forward_s": 0.5, "backward_s": 1.0}
    return found | {k: v(step) if callable(v) else v for k, v in more.items()}


def write(folder, lines, torn="", samples=()):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + torn)
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    (folder / "config.yaml").write_text(f"run:\n  bridge: b1\n  model: '{EVIL}'\n")
    return folder


@pytest.fixture
def make_run(tmp_path):
    def make(name, steps=40, torn="", samples=(), **more):
        return write(tmp_path / name, [line(step, **more) for step in range(1, steps + 1)], torn, samples)

    return make


@pytest.fixture
def quick(monkeypatch):
    """Pages are made without curves, which take a second."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def report(*words):
    return main(["report", *map(str, words)])


# --- numbers, and what follows ----------------------------------------------------------------------------


def test_the_summary_has_the_numbers_of_the_run(make_run):
    reward = {"reward_mean": lambda step: None if step == 5 else step / 20, "discarded_total": 4}
    found = summary(read_run(make_run("one", 20, **reward)))
    assert (found["steps"], found["tokens"], found["wall_s"], found["tokens_per_s"]) == (20, 2000, 38.0, 50.0)
    assert (found["reward_first"], found["reward_last"]) == (pytest.approx(0.075), pytest.approx(0.975))
    assert (found["reward_best"], found["reward_best_step"]) == (1.0, 20)
    assert found["time_s"] == {"wait": 10.0, "forward": 10.0, "backward": 20.0}
    assert found["idle_frac"] == 0.25
    assert (found["staleness_mean"], found["staleness_max"], found["discarded_total"]) == (1.0, 2.0, 4.0)


@pytest.mark.parametrize(("again", "steps", "repeated"), [((3, 4), [1, 2, 3, 4], 2), ((2,), [1, 2], 3)])
def test_steps_that_a_resume_took_back_count_once(tmp_path, again, steps, repeated):
    lines = [line(step) for step in (1, 2, 3, 4)] + [line(step, reward_mean=0.9) for step in again]
    run = read_run(write(tmp_path / "again", lines, torn='{"step": 5, "lo'))
    assert run.steps.tolist() == steps
    assert run.column("reward_mean")[again[0] - 1 :].tolist() == [0.9] * len(again)
    assert (run.repeated, run.torn) == (repeated, 1)


def test_an_older_run_without_a_split_of_its_time(tmp_path):
    lines = [{"step": step, "wait_s": 0.5, "forward_backward_s": 1.5} for step in (1, 2, 3)]
    assert summary(read_run(write(tmp_path, lines)))["time_s"] == {"wait": 1.5, "forward_backward": 4.5}


def test_a_folder_without_a_run_is_an_error(make_run, tmp_path, capsys):
    with pytest.raises(NoRun):
        read_run(make_run("empty", 0))
    assert report(tmp_path / "nothing") == 1
    assert "--run-dir" in capsys.readouterr().err


NOISE = (0.1, -0.1, 0.05, -0.05)
LOST = {
    "bridge/drops_full_total": 3,
    "dropped_total": 3,
    "bridge/discards_stale_total": 1,
    "discarded_total": 1,
}


@pytest.mark.parametrize(
    ("steps", "metrics", "words"),
    [
        (40, {"wait_s": 2.25}, ["waits for environments 60% of the time: add"]),
        (40, {"wait_s": 0.375}, ["waits for environments 20% of the time: a few more"]),
        (40, {"wait_s": 0.0}, ["would not make it faster"]),
        # the wait for the first batch is no reason for more environments
        (40, {"wait_s": lambda step: 500.0 if step == 1 else 0.0}, ["would not make it faster"]),
        (40, {"publish_s": 2.0}, ["publishing weights takes 50% of the time: raise --publish-every"]),
        (40, {"reward_mean": lambda step: 0.5 + 0.02 * step + NOISE[step % 4]}, ["reward rose from"]),
        (40, {"reward_mean": lambda step: 0.5 - 0.02 * step + NOISE[step % 4]}, ["reward fell from"]),
        (40, {"reward_mean": lambda step: 0.5 + NOISE[step % 4]}, ["reward did not change"]),
        (40, {"reward_mean": None}, ["no trajectory has a score"]),
        (40, {}, ["nothing was dropped or discarded"]),
        (40, LOST, ["3 records were dropped by producers since", "1 record was discarded as too old"]),
        (40, {"groups": 10, "groups_flat": 7}, ["70% of the groups teach nothing"]),
        (40, {"trajectories": 80, "trajectories_truncated": 60}, ["75% of the completions were cut"]),
    ],
)
def test_what_follows_and_what_to_do(make_run, steps, metrics, words):
    found = summary(read_run(make_run("one", steps, **metrics)))
    every = "\n".join(found["conclusions"])
    assert all(each in every for each in words)
    assert all(each in as_text(found) for each in found["conclusions"])
    assert ("nothing was dropped" in every) == (metrics is not LOST)


def test_a_short_run_has_no_conclusion_about_its_reward(make_run):
    found = summary(read_run(make_run("one", 5)))
    assert "reward" not in "\n".join(found["conclusions"])


def test_faults_come_first_with_their_first_step(make_run):
    faults = {"mismatch_alarms_total": lambda step: step // 10, "update_skipped": lambda step: step == 3}
    faults |= {"rows_compared{maze}": 4, "rows_differ{maze}": lambda step: int(step == 9)}
    alarm, rows, skipped = summary(read_run(make_run("one", **faults)))["conclusions"][:3]
    assert "in 4 steps, first in step 10, the sampler was not the policy" in alarm
    assert "1 row was trained with other values" in rows
    assert "1 update was skipped" in skipped
    assert "first in step 3" in skipped


# --- curves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["svg", "png"])
def test_the_picture_of_a_long_run_and_its_words(make_run, capsys, form):
    pytest.importorskip("matplotlib")
    maze = {
        "atropos/maze/mean_score": 0.2,
        "atropos/$a_$/mean_score": lambda step: None if step == 7 else 0.4,
    }
    lost = {"bridge/drops_full_total": 2.0, "bridge/lanes_live": 2, "discarded_total": 4}
    more = {"eval/mean_score": lambda step: 0.4 if step == 9 else None}
    folder = make_run("long", 3000, reward_mean=lambda step: step / 3000, **maze, **lost, **more)
    assert report(folder, "--format", form) == 0
    out = capsys.readouterr().out
    assert "long: 3000 steps, 300,000 tokens in 5,998 s, 50 tokens/s" in out
    assert "time       wait 25%, forward 25%, backward 50%" in out
    assert "4 records discarded" in out
    file = folder / f"report.{form}"
    assert f"plot: {file}" in out
    assert 10_000 < file.stat().st_size < BYTES
    if form == "svg":
        drawn = re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text())
        assert {"mean score of a batch", "loss", "tokens per second", "lanes", "share of a step's time"} <= {
            *drawn
        }
        assert {"evaluation groups", "maze", "$a_$", "dropped, full", "backward"} <= {*drawn}


def test_the_summary_comes_without_matplotlib_and_the_error_says_what_to_do(make_run, capsys, quick):
    folder = make_run("one", 1)
    with pytest.raises(page.MatplotlibMissing):
        page.plot([read_run(folder)], folder / "x.svg", "svg")
    assert report(folder, "--format", "svg") == 1
    out, err = capsys.readouterr()
    assert "one: 1 steps" in out
    assert "--format none" in err
    assert report(folder) == 0
    assert "curves need the matplotlib package" in (folder / "report.html").read_text()


# --- the page ---------------------------------------------------------------------------------------------


def trajectory(score, tokens, advantages, **more):
    found = {"completion": "".join(tokens), "score": score, "finish_reason": "stop", "tokens": tokens}
    return found | {"advantages": advantages} | more


def sample(step, why="spread", env="maze", **more):
    steps = {"step_rewards": [0.25], "step_ends": [2]}
    rows = [
        trajectory(0.0, ["back", EVIL], [-0.5, -1.0]),
        trajectory(1.0, ["left ", "or ", "then ", "right"], [0.5, 0.5, None, 1.0], **steps),
    ]
    found = {"step": step, "why": why, "env_name": env, "group_id": f"{env}:{step}", "group_size": 2}
    found |= {"min_policy_version": step - 1, "max_policy_version": step - 1}
    return found | {"prompt": f"where to? {EVIL}", "trajectories": rows} | more


def test_the_page_of_several_runs_in_chromium(tmp_path, make_run, capsys):
    """Folders of one name are told apart; nothing that a run says is markup; no script runs."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    folders = [make_run(f"{name}/run", samples=[sample(1)]) for name in ("a", "b")]
    assert report(*folders, "--out", tmp_path / "both", "--json") == 0
    file = tmp_path / "both" / "report.html"
    printed = json.loads(capsys.readouterr().out)
    assert printed["page"] == str(file)
    assert [each["run"] for each in printed["runs"]] == [*map(str, folders)]
    text = file.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(|<script|<img src=x""", text)
    probe = "<script>document.title = 'owned'</script></body>"
    file.write_text(text.replace("</body>", probe))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    flags += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path}"]
    words = [CHROMIUM, *flags, file.as_uri()]
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(console) == 1  # the probe was refused; the picture and the style were not
    assert "Content Security Policy" in console[0]
    assert f"<title>{folders[0]} and {folders[1]} - shmbridge report</title>" in done.stdout
    assert "reward at the end" in done.stdout
    assert done.stdout.count("<details>") == 2 * (1 + 2)  # a group, the configuration, the facts


def test_a_group_has_its_tokens_with_their_advantages_best_first(make_run, quick):
    cut = trajectory(0.5, ["a", "b"], [1.0, 1.0], cut_at=1, cut=7, step_rewards=[1, 2], step_ends=[1, 9])
    folder = make_run("run", samples=[sample(1), sample(10, trajectories=[cut])])
    assert report(folder) == 0
    text = (folder / "report.html").read_text()
    assert "step 1, maze, spread, version 0: 1, 0</summary>" in text
    best, worst = re.findall(r"<article>(.*?)</article>", text, re.DOTALL)[:2]
    assert best.startswith("<h4>score 1, stop</h4>")
    pieces = re.findall(
        r'<span class="(\w+)"(?: style="[^"]*, ([\d.]+)\)")?(?: title="([^"]*)")?>([^<]*)', best
    )
    assert pieces == [
        ("plus", "0.30", "advantage +0.5", "left or "),
        ("step", "", "", "step 1: +0.25"),
        ("untrained", "", "", "then "),
        ("plus", "0.60", "advantage +1", "right"),
    ]
    assert 'class="minus"' in worst
    shown = re.findall(r"<article>(.*?)</article>", text, re.DOTALL)[2]
    assert re.findall(r">([^<]+)</span>", shown) == [
        "a",
        "step 1: +1",
        "7 tokens left out",
        "b",
        "step 2: +2",
    ]


@pytest.mark.parametrize("damaged", ["samples.jsonl", "config.yaml"])
def test_a_run_without_samples_or_configuration_has_a_page(make_run, quick, damaged):
    folder = make_run("run", 3)
    (folder / damaged).unlink()
    assert report(folder) == 0
    assert "There are no samples" in (folder / "report.html").read_text()


def test_samples_that_a_resume_took_back_count_once_and_torn_lines_are_counted(make_run):
    again = [sample(step, why) for step in (1, 10, 20, 10, 20) for why in ("spread", "random")]
    uneven = sample(32, trajectories=[trajectory(1.0, ["a"], [1.0, 2.0])])
    folder = make_run("run", 1, samples=[*again, uneven])
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 30, "pro\n{"step": 31}\n[]\n')
    found = read_samples(folder)
    assert [each.step for each in found.groups] == [1, 1, 10, 10, 20, 20]
    assert (found.left_out, found.torn) == (0, 4)


def test_more_samples_than_a_page_holds_are_spread_over_the_run(make_run):
    folder = make_run("run", 1, samples=[sample(step) for step in range(1, 101)])
    found = read_samples(folder, most_bytes=20_000)
    steps = [each.step for each in found.groups]
    assert found.left_out == 100 - len(steps)
    assert 5 < len(steps) < 60
    assert steps[-1] > 90
    assert max(b - a for a, b in pairwise(steps)) <= 100 // len(steps) + 1


def test_numbers_out_of_this_world_are_unknown_and_end_nothing(make_run, quick, capsys):
    """json.loads reads Infinity and NaN, and recurses as deep as a line is nested."""
    digits = "9" * 400
    odd = '{"step": 1e400}\n[]\n{"step": 2, "loss": 1e999, "tokens": Infinity, "reward_mean": NaN, '
    deep = "[" * 100_000 + "\n"
    folder = make_run("odd", 1, torn=f'{odd}"time": {digits}}}\n\x00\n{deep}', samples=[sample(1)])
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample(2) | {"step": math.inf}) + "\n" + deep)
    assert report(folder) == 0
    out = capsys.readouterr().out
    assert "odd: 2 steps, 100 tokens" in out
    assert "4 torn lines" in out
    found = read_samples(folder)
    assert (len(found.groups), found.torn) == (1, 2)


def test_a_page_that_cannot_be_written_leaves_the_words(make_run, capsys, quick):
    assert report(make_run("one", 1), "--out", "/proc/nowhere") == 1
    out, err = capsys.readouterr()
    assert "one: 1 steps" in out
    assert "no page in /proc/nowhere/report.html" in err
