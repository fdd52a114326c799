"""`shmbridge report`: the numbers of a run, in words and in a picture; test_report_page.py has the page."""

from __future__ import annotations

import json

import pytest

from shmbridge.cli import main
from shmbridge.consumers.learner.report import page
from shmbridge.consumers.learner.report.run import NoRun, read_run, summary

SVG_BYTES = 300_000


def line(step, reward=0.5, **more):
    said = {"step": step, "time": 1000.0 + 2.0 * step, "tokens": 100, "reward_mean": reward, "loss": -0.1}
    said |= {"staleness_mean": 1.0, "staleness_max": 2, "update_skipped": False, "discarded_total": 4}
    return said | {"wait_s": 0.5, "forward_s": 0.5, "backward_s": 1.0, "forward_backward_s": 1.5} | more


@pytest.fixture
def make_run(tmp_path):
    def make(name, lines, torn=""):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(each) + "\n" for each in lines) + torn
        (tmp_path / name / "metrics.jsonl").write_text(text)
        return tmp_path / name

    return make


def test_the_summary_has_the_numbers_of_the_run(make_run):
    lines = [line(step, reward=step / 20) for step in range(1, 21)]
    lines[4]["reward_mean"] = None
    found = summary(read_run(make_run("one", lines)))
    assert (found["steps"], found["tokens"], found["wall_s"], found["tokens_per_s"]) == (20, 2000, 38.0, 50.0)
    assert (found["reward_first"], found["reward_last"]) == (pytest.approx(0.075), pytest.approx(0.975))
    assert (found["reward_best"], found["reward_best_step"]) == (1.0, 20)
    assert found["time_s"] == {"wait": 10.0, "forward": 10.0, "backward": 20.0}
    assert found["idle_frac"] == 0.25
    assert (found["staleness_mean"], found["staleness_max"], found["discarded_total"]) == (1.0, 2.0, 4.0)


def test_steps_that_a_resume_took_back_count_once_and_torn_lines_are_said(make_run):
    lines = [line(step) for step in (1, 2, 3, 4)] + [line(step, reward=0.9) for step in (3, 4)]
    run = read_run(make_run("again", lines, torn='{"step": 5, "lo'))
    assert run.steps.tolist() == [1, 2, 3, 4]
    assert run.column("reward_mean").tolist() == [0.5, 0.5, 0.9, 0.9]
    assert (run.repeated, run.torn) == (2, 1)


def test_a_resume_that_stopped_earlier_ends_the_run_there(make_run):
    lines = [line(step) for step in (1, 2, 3, 4)] + [line(2, reward=0.9)]
    assert read_run(make_run("again", lines)).steps.tolist() == [1, 2]


@pytest.mark.parametrize("format", ["svg", "png"])
def test_the_picture_and_the_words(make_run, capsys, format):
    pytest.importorskip("matplotlib")
    lines = [line(step, reward=step / 5000) for step in range(1, 5001)]
    lines[9]["eval/mean_score"] = 0.4
    folder = make_run("long", lines)
    assert main(["report", str(folder), "--format", format]) == 0
    out = capsys.readouterr().out
    assert "long: 5000 steps, 500,000 tokens in 9,998 s, 50 tokens/s" in out
    assert "time       wait 25%, forward 25%, backward 50%" in out
    assert "4 records discarded" in out
    file = folder / f"report.{format}"
    assert f"plot: {file}" in out
    assert 10_000 < file.stat().st_size < SVG_BYTES
    if format == "svg":
        for words in (
            "mean reward of a batch",
            "loss",
            "staleness",
            "tokens per second",
            "share of a step",
            "backward",
        ):
            assert words in file.read_text()


def test_several_runs_are_compared_in_one_picture(make_run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folders = [make_run(name, [line(step) for step in range(1, 9)]) for name in ("first", "second")]
    assert (
        main(["report", *map(str, folders), "--out", str(tmp_path / "both"), "--json", "--format", "svg"])
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in said["runs"]] == ["first", "second"]
    assert said["plot"] == str(tmp_path / "both" / "report.svg")
    text = (tmp_path / "both" / "report.svg").read_text()
    assert "first" in text
    assert "second" in text


def test_an_older_run_without_a_split_of_its_time_is_shown_too(make_run, capsys):
    lines = [line(step) for step in range(1, 4)]
    for each in lines:
        del each["forward_s"], each["backward_s"]
    assert main(["report", str(make_run("old", lines)), "--format", "none"]) == 0
    assert "time       wait 25%, forward_backward 75%" in capsys.readouterr().out


def test_the_summary_comes_without_matplotlib_and_the_error_says_what_to_do(make_run, capsys, monkeypatch):
    def missing(runs, file):
        raise page.MatplotlibMissing("a plot needs the matplotlib package")

    monkeypatch.setattr(page, "plot", missing)
    assert main(["report", str(make_run("one", [line(1)])), "--format", "svg"]) == 1
    out, err = capsys.readouterr()
    assert "one: 1 steps" in out
    assert "matplotlib" in err


def test_matplotlib_that_is_not_there(make_run, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(page.MatplotlibMissing, match="--format none"):
        page.plot([read_run(make_run("one", [line(1)]))], tmp_path / "x.svg")


def test_a_folder_without_a_run_is_an_error(make_run, tmp_path, capsys):
    with pytest.raises(NoRun, match="no step yet"):
        read_run(make_run("empty", []))
    assert main(["report", str(tmp_path / "nothing")]) == 1
    assert "--run-dir" in capsys.readouterr().err


def test_numbers_out_of_this_world_are_unknown(make_run, capsys):
    odd = (
        f'{{"step": 1e400}}\n[]\n{{"step": 2, "loss": 1e999, "tokens": Infinity, "reward_mean": NaN, '
        f'"time": {"9" * 400}}}\n\x00\n'
    )
    folder = make_run("odd", [line(1)], torn=odd)
    assert main(["report", str(folder), "--format", "none"]) == 0
    said = capsys.readouterr().out
    assert "odd: 2 steps, 100 tokens" in said
    assert "3 torn lines" in said
    (folder / "metrics.jsonl").write_text(odd)
    assert main(["report", str(folder), "--format", "none"]) == 0
    assert "best unknown\n" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_leaves_the_words(make_run, capsys):
    assert main(["report", str(make_run("one", [line(1)])), "--out", "/proc/nowhere"]) == 1
    said = capsys.readouterr()
    assert "one: 1 steps" in said.out
    assert "no page in /proc/nowhere/report.html" in said.err
