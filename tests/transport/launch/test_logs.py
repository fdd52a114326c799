"""`shmbridge logs`, and the line about the learner's newest step."""

import itertools
import json
import os
import pty

import pytest

from shmbridge.cli import main
from shmbridge.launch.events import Events
from shmbridge.launch.logs import LogFile, followed
from shmbridge.launch.step_lines import NewSteps, step_line, steps_of
from shmbridge.log_format import lines

METRICS = {
    "reward_mean": 0.5,
    "tokens": 500,
    "step_s": 0.25,
    "wait_s": 0.05,
    "idle_frac": 0.2,
    "staleness_mean": 1.25,
}


@pytest.fixture
def run_dir(tmp_path):
    """Two services, whose lines alternate; one writes a line without a time."""
    (tmp_path / "logs").mkdir()
    first = [lines("learner", f"step {at}", at=at) for at in (1, 3)]
    (tmp_path / "logs/learner.log").write_text("\n".join(first) + "\n")
    second = [lines("vllm", "up", at=2.0), "no stamp", lines("vllm", "hot", "WARNING", at=4.0)]
    (tmp_path / "logs/vllm.log").write_text("\n".join(second))  # the last line has no end
    return tmp_path


def shown(capsys) -> list[str]:
    return [line.split(": ", 1)[-1] for line in capsys.readouterr().out.splitlines()]


def test_logs_are_merged_in_the_order_of_time(run_dir, capsys) -> None:
    assert main(["logs", str(run_dir)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ", 1)[1] for line in out] == ["step 1", "up", "no stamp", "step 3", "hot"]
    assert out[2] == "vllm: no stamp"


def test_one_log_by_name(run_dir, capsys) -> None:
    assert main(["logs", str(run_dir), "vllm"]) == 0
    assert shown(capsys) == ["up", "no stamp", "hot"]


def test_levels(run_dir, capsys) -> None:
    assert main(["logs", str(run_dir), "--level", "WARNING"]) == 0
    assert shown(capsys) == ["hot"]


def test_json_for_programs(run_dir, capsys) -> None:
    assert main(["logs", str(run_dir), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["name"], each["level"]) for each in found][1:3] == [("vllm", "INFO"), ("vllm", None)]
    assert found[2]["time"] == found[1]["time"]


def test_following_goes_on_with_new_and_complete_lines(run_dir) -> None:
    path = run_dir / "logs/learner.log"
    following = followed([LogFile("learner", path)])
    assert [line.text[-6:] for line in itertools.islice(following, 2)] == ["step 1", "step 3"]
    with path.open("a") as log:
        log.write(lines("learner", "step 4") + "\nbegun")
    assert next(following).text.endswith("step 4")
    with path.open("a") as log:
        log.write(" and ended\n")
    assert next(following).text == "begun and ended"


def test_a_wrong_name_names_the_right_ones(run_dir, tmp_path, capsys) -> None:
    assert main(["logs", str(run_dir), "lerner"]) == 2
    assert capsys.readouterr().err == (
        "shmbridge logs: error: no log of 'lerner', but of learner, vllm -> take learner\n"
    )


def test_a_step_line_says_what_one_looks_for() -> None:
    line = step_line({"step": 12, **METRICS}, 400)
    assert line == "step 12/400  reward 0.500  2,000 tokens/s  waiting 20%  staleness 1.2"
    assert step_line({"step": 3, "reward_mean": None}, 0) == "step 3  staleness 0.0"


def test_only_new_and_whole_steps_are_read(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert NewSteps(path, 400).newest() is None
    path.write_text('{"step": 1}\n')
    steps = NewSteps(path, 400)
    assert steps.newest() is None  # of an earlier run
    with path.open("a") as file:
        file.write('{"step": 2}\n{"step": 3}\n{"st')
    assert steps.newest() == {"step": 3}
    assert steps.newest() is None
    with path.open("a") as file:
        file.write('ep": 4}\n')
    assert steps.newest() == {"step": 4}


def test_a_pipe_gets_some_twenty_lines_of_a_run(tmp_path) -> None:
    steps = NewSteps(tmp_path / "none", 400)
    due = [step for step in range(1, 401) if steps.is_due(step)]
    assert due == [1, *range(20, 401, 20)]
    short = NewSteps(tmp_path / "none", 3)
    assert [step for step in range(1, 4) if short.is_due(step)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("command", "steps"), [(["-m", "x", "--steps", "7"], 7), (["--steps=8"], 8), (["--steps"], 0), ([], 0)]
)
def test_steps_of_a_command_line(command, steps) -> None:
    assert steps_of(command) == steps


def test_a_terminal_has_one_line_for_steps(tmp_path) -> None:
    """It is drawn over, and other events take its place."""
    master, terminal = pty.openpty()
    before = os.dup(2)
    try:
        os.dup2(terminal, 2)
        events = Events(tmp_path / "events.jsonl", as_json=False)
        for step in range(3):
            events.step(f"step {step}", is_due=False)
        events.say("done", "learner: done")
    finally:
        os.dup2(before, 2)
        os.close(before)
    text = ""
    while "\n" not in text:
        text += os.read(master, 4096).decode()
    os.close(master)
    os.close(terminal)
    assert text.count("\n") == 1
    assert text.count("\r[") == 3
    assert "\r\x1b[K[" in text
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 1


def test_following_begins_again_when_a_log_was_cut(run_dir) -> None:
    """As log rotation by copying does."""
    path = run_dir / "logs/learner.log"
    following = followed([LogFile("learner", path)])
    assert len(list(itertools.islice(following, 2))) == 2
    path.write_text(lines("learner", "again") + "\n")
    assert next(following).text.endswith("again")
