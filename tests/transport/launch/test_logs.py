"""`shmbridge logs`, and the line about the learner's newest step."""

import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from shmbridge.cli import main
from shmbridge.cli.log import lines
from shmbridge.launch import guardian
from shmbridge.launch.logs import LogFile, followed
from shmbridge.launch.supervisor import Events, NewSteps, step_line, steps_of

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


def test_one_log_by_name_and_level(run_dir, capsys) -> None:
    assert main(["logs", str(run_dir), "vllm", "--level", "WARNING"]) == 0
    assert shown(capsys) == ["hot"]


def test_json_for_programs(run_dir, capsys) -> None:
    assert main(["logs", str(run_dir), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["name"], each["level"]) for each in found][1:3] == [("vllm", "INFO"), ("vllm", None)]
    assert found[2]["time"] == found[1]["time"]


def test_what_the_output_cannot_encode_is_escaped(run_dir) -> None:
    (run_dir / "logs/odd.log").write_bytes("größe \u2713 \x1b[2J".encode() + b"\xff\n")
    words = [sys.executable, "-m", "shmbridge", "logs", str(run_dir), "odd"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"gr\\xf6\\xdfe \\u2713 \x1b[2J\\ufffd\n"


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


# --- the limit --------------------------------------------------------------------------------------------

LIMIT = 256 << 10
NUMBERED = """
import sys
text = "".join(f"{n:08} {'.' * (n % 90)}\\n" for n in range(int(sys.argv[1])))
sys.stdout.write(text)
"""
INTO_A_LOG = """
import os, random, sys
from shmbridge.launch import guardian

path, most, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
drawn = random.Random(seed)
text = b"".join(b"%07d %s\\n" % (n, b"." * int(drawn.paretovariate(0.8))) for n in range(4000))
open(path, "ab").close()
out = os.dup(1)
for part in range(2):  # a restart in the middle
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    log = guardian.Log(path, most, "env", lambda: os.write(out, b"told\\n"))
    here = text[: len(text) // 2] if part == 0 else text[len(text) // 2 :]
    while here:
        size = drawn.choice([1, 10, 500, 4096, 65536])
        log.write(here[:size])
        here = here[size:]
        there = [each for each in (path, f"{path}.1", f"{path}.first") if os.path.exists(each)]
        assert sum(map(os.path.getsize, there)) <= most
os.write(out, b"%d" % len(text))
"""


def parts(log):
    """The beginning without the line at its end, and what goes on; bytes missing between."""
    lost, place = guardian.missing(str(log))
    first = log.with_name(f"{log.name}.first").read_bytes()
    beginning = first[: first.rindex(b"\n", 0, place) + 1] if lost else first
    last = [
        part for part in (log.with_name(f"{log.name}.1"), log) if part.exists()
    ]  # a kill can come between
    return beginning, b"".join(part.read_bytes() for part in last), lost


def run_python(code, *words):
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_and_what_is_missing_are_the_whole(tmp_path, seed):
    """Whatever the lengths of lines and of pieces, also where a line is longer than a part."""
    log = tmp_path / "env.log"
    done = run_python(INTO_A_LOG, log, (4096, 20_000, 100_000)[seed % 3], seed)
    assert done.returncode == 0, done.stderr
    told, _, size = done.stdout.rpartition("\n")
    beginning, end, lost = parts(log)
    assert len(beginning) + lost + len(end) == int(size)
    assert (told == "told") == (lost > 0)
    assert beginning.startswith(b"0000000 ")
    assert re.search(rb"^0003999 \.*\n\Z", end, re.MULTILINE)
    numbers = [int(each) for each in re.findall(rb"^(\d{7}) ", beginning + end, re.MULTILINE)]
    assert numbers == sorted(numbers)


def test_a_full_disk_costs_output_and_not_the_program(tmp_path):
    code = """
import os, sys
from shmbridge.launch import guardian
path = sys.argv[1]
open(path, "w").close()
log = guardian.Log(path, 1 << 20, "env", print)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
log.write(b"lost\\n")
log.write(b"lost, too\\n")
os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), 1)
log.write(b"kept\\n")
"""
    done = run_python(code, tmp_path / "env.log")
    assert done.returncode == 0, done.stderr
    note, kept = (tmp_path / "env.log").read_text().splitlines()
    assert note.endswith(" WARNING env: 15 bytes of output are missing here: the disk is full")
    assert kept == "kept"


def test_a_full_disk_costs_no_restart(launch):
    hub, env = launch.service("hub", role="hub"), launch.service("env", "--live", 0.3, "--status", 1)
    (launch.run_dir / "logs").mkdir(parents=True)
    (launch.run_dir / "logs" / "env.log").symlink_to("/dev/full")
    launch.start([hub], [env])
    launch.until(lambda: len(launch.noted("start")) >= 4 or launch.said("failed"))
    assert not launch.said("failed")
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    launch.until_nothing_lives()


def used(launch):
    """Bytes that logs take on the disk, whatever is renamed meanwhile."""
    found = {}
    for entry in os.scandir(launch.run_dir / "logs"):
        try:
            about = entry.stat()
        except FileNotFoundError:
            continue
        found[about.st_ino] = max(about.st_size, 512 * about.st_blocks)
    return sum(found.values())


@pytest.mark.parametrize("who", ["nobody", "supervisor"])
def test_a_flood_of_output_takes_no_more_than_the_limit(launch, who):
    """More than a gigabyte a second where the machine can; looked at while it comes."""
    hub = launch.service("hub", role="hub")
    hub.command = ["sh", "-c", f"echo the first line; exec yes {'x' * 79}"]
    launch.log_bytes = LIMIT
    launch.start([hub])
    log = launch.run_dir / "logs" / "hub.log"
    most = 0
    launch.until(lambda: (launch.run_dir / "logs").exists())
    while guardian.missing(str(log))[0] < 64 << 20:
        most = max(most, used(launch))
    assert LIMIT / 2 < most < LIMIT + (64 << 10), "rounded up to blocks"
    launch.until(lambda: launch.said("log"))
    if who == "supervisor":
        os.kill(launch.supervisor(), signal.SIGKILL)
    else:
        launch.send(signal.SIGTERM)
    assert launch.wait() == (137 if who == "supervisor" else 143)
    launch.until_nothing_lives()
    (said,) = launch.said("log")
    assert said["service"] == "hub"
    assert "hub: its log has 256 KiB, log_bytes: the beginning" in said["text"]
    beginning, end, lost = parts(log)
    assert lost >= said["missing_bytes"] > 0
    assert b"start 1 of hub\nthe first line\nxxxx" in beginning
    assert set(end.splitlines()[:-1]) == {b"x" * 79}, "lines are whole"


def test_a_restart_goes_on_with_the_same_log_and_every_byte_is_accounted_for(launch, capsys):
    hub, env = launch.service("hub", role="hub"), launch.service("env")
    env.command = [sys.executable, "-c", f"{NUMBERED}print('the end', flush=True); sys.exit(1)", "20000"]
    env.check.within_s = 0.0
    launch.log_bytes = LIMIT
    launch.start([hub], [env])
    launch.until(lambda: len(launch.said("ended", "env")) >= 2)
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    assert len(launch.said("log")) == 1
    _, _, lost = parts(launch.run_dir / "logs" / "env.log")
    assert used(launch) < LIMIT + (64 << 10)
    assert main(["logs", str(launch.run_dir), "env"]) == 0
    shown = capsys.readouterr().out
    note = f" WARNING env: {lost:20,} bytes of output are missing here"
    places = [
        shown.index("start 1 of env"),
        shown.index("00000009 "),
        shown.index(note),
        shown.rindex("the end"),
    ]
    assert places == sorted(places)


def test_the_end_of_a_log_is_shown_across_its_parts(launch):
    hub = launch.service("hub", role="hub", within_s=60)
    hub.command = [sys.executable, "-c", f"{NUMBERED}sys.exit(4)", "9000"]
    launch.log_bytes = LIMIT
    launch.start([hub])
    assert launch.wait() == 1
    assert "00008999 " in launch.said("failed")[0]["text"]
    assert "00008990 " in launch.said("failed")[0]["text"]


def test_following_goes_on_where_a_log_begins_a_part(run_dir) -> None:
    log = run_dir / "logs/learner.log"
    following = followed([LogFile("learner", log)])
    assert [line.text[-6:] for line in itertools.islice(following, 2)] == ["step 1", "step 3"]
    with log.open("a") as file:
        file.write("the last of this part\n")
    log.rename(run_dir / "logs/learner.log.first")
    log.write_text("the first of the next\n")
    assert [next(following).text for _ in range(2)] == ["the last of this part", "the first of the next"]
    log.rename(run_dir / "logs/learner.log.1")
    log.write_text("and of another\n")
    assert next(following).text == "and of another"
    assert len(list(LogFile("learner", log).read())) == 5
