"""Logs of programs: time, level and role on every line; errors of users in one line, without a traceback."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from shmbridge.cli.base import refuse
from shmbridge.cli.log import LogFormat, StampedLines, lines, stamp_of
from shmbridge.errors import LaneFull


def test_each_line_has_time_level_and_role() -> None:
    text = lines("learner", "one\ntwo", "WARNING", at=0.0625)
    assert [line[23:] for line in text.splitlines()] == [" WARNING learner: one", " WARNING learner: two"]
    assert text[19:23] == ".062"
    assert stamp_of(text)["level"] == "WARNING"
    assert stamp_of("Traceback (most recent call last):") is None
    assert stamp_of("2026-11-23 12:00:01,123 INFO learner: of another format") is None


def test_a_traceback_has_it_on_each_line() -> None:
    record = logging.LogRecord("shmbridge.x", logging.ERROR, "", 0, "wrong: %d", (7,), None)
    try:
        raise ValueError("no")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = LogFormat("gateway").format(record)
    assert len(text.splitlines()) > 3
    assert {stamp_of(line)["role"] for line in text.splitlines()} == {"gateway"}


def said(stream: io.StringIO) -> list[tuple[str, str]]:
    """(level, text) of each line."""
    found = [(stamp_of(line), line) for line in stream.getvalue().splitlines()]
    return [(stamp["level"], line[stamp.end() :]) for stamp, line in found]


def test_what_is_printed_is_stamped_line_by_line() -> None:
    inner = io.StringIO()
    stream = StampedLines(inner, "env")
    print("one", "two", file=stream)
    print("be", end="", file=stream)
    assert len(said(inner)) == 1
    print("gin\nlogged: WARNING: x", file=stream)
    stream.write("rest")
    stream.end_line()
    assert said(inner) == [
        ("INFO", "one two"),
        ("INFO", "begin"),
        ("WARNING", "logged: WARNING: x"),
        ("INFO", "rest"),
    ]


def test_of_a_progress_bar_the_last_state_is_kept() -> None:
    inner = io.StringIO()
    stream = StampedLines(inner, "env")
    for percent in range(101):
        stream.write(f"\rloading {percent}%")
    stream.write("\nnext\r\n")
    assert said(inner) == [("INFO", "loading 100%"), ("INFO", "next")]


def test_a_line_that_has_a_stamp_gets_no_second_one() -> None:
    inner = io.StringIO()
    stream = StampedLines(inner, "env")
    line = lines("rank1", "mine", "ERROR")
    print(line, file=stream)
    assert inner.getvalue() == line + "\n"


PROGRAM = """
import logging, sys, warnings
from shmbridge.cli.base import refuse, run_program, tell
def main():
    print("a result")
    tell("prog", "told")
    logging.getLogger("shmbridge.x").info("logged")
    logging.getLogger("others").info("not of ours")
    warnings.warn("beware")
    {then}
    return 3
raise SystemExit(run_program("prog", main))
"""


def run(then: str, one_file: bool, tmp_path, **env: str) -> tuple[int, str, str]:
    """Returns exit status, standard output and standard error of a program."""
    (tmp_path / "program.py").write_text(PROGRAM.format(then=then))
    command = [sys.executable, str(tmp_path / "program.py")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHMBRIDGE_")}
    if not one_file:
        done = subprocess.run(command, capture_output=True, text=True, env=kept | env)
        return done.returncode, done.stdout, done.stderr
    with (tmp_path / "log").open("w+") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=kept | env).returncode
        log.seek(0)
        return code, log.read(), ""


def test_a_help_in_a_file_is_as_on_a_terminal(tmp_path) -> None:
    with (tmp_path / "help").open("w+") as file:
        words = [sys.executable, "-m", "shmbridge.producers.skyrl_gym", "--help"]
        assert subprocess.run(words, stdout=file, stderr=file).returncode == 0
        file.seek(0)
        text = file.read()
    assert text.startswith("usage: python -m shmbridge.producers.skyrl_gym ")
    assert not [line for line in text.splitlines() if stamp_of(line)]


def test_a_log_file_has_nothing_else(tmp_path) -> None:
    code, log, _ = run('refuse("prog", "wrong", "right")', True, tmp_path, SHMBRIDGE_LOG_NAME="mine")
    assert code == 3
    assert {stamp_of(line)["role"] for line in log.splitlines()} == {"mine"}
    assert [line[24:] for line in log.splitlines() if "warn" not in line.lower()] == [
        "INFO mine: a result",
        "INFO mine: told",
        "INFO mine: logged",
        "ERROR mine: wrong -> right",
    ]
    assert "WARNING mine:" in log


@pytest.mark.parametrize("name", ["", "mine"])
def test_one_pipe_is_a_log_if_a_launch_has_given_a_name(tmp_path, name) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(then="pass"))
    kept = {each: value for each, value in os.environ.items() if not each.startswith("SHMBRIDGE_")}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=kept | ({"SHMBRIDGE_LOG_NAME": name} if name else {}),
    )
    assert ("a result" in done.stdout.splitlines()) == (not name)
    assert any(line.endswith(f" INFO {name or 'prog'}: logged") for line in done.stdout.splitlines())
    assert any(line.endswith(" INFO mine: a result") for line in done.stdout.splitlines()) == bool(name)


def test_pipes_get_results_as_they_are(tmp_path) -> None:
    code, out, err = run('refuse("prog", "wrong", "right")', False, tmp_path)
    assert (code, out) == (3, "a result\nprog: told\n")
    assert err.splitlines()[0].endswith(" INFO prog: logged")
    assert err.splitlines()[-1] == "prog: error: wrong -> right"


@pytest.mark.parametrize(("debug", "shown"), [("0", False), ("1", True)])
def test_an_interrupt_shows_a_traceback_with_debug_only(tmp_path, debug, shown) -> None:
    code, _, err = run("raise KeyboardInterrupt", False, tmp_path, SHMBRIDGE_DEBUG=debug)
    assert code == -signal.SIGINT
    assert ("Traceback" in err) == shown


def test_an_error_of_ours_keeps_its_traceback(tmp_path) -> None:
    code, log, _ = run("1 / 0", True, tmp_path)
    assert code == 1
    assert "ZeroDivisionError" in log
    assert all(map(stamp_of, log.splitlines()))


@pytest.mark.parametrize("debug", ["", "0", "1"])
def test_an_error_of_the_user_is_one_line(capsys, monkeypatch, debug) -> None:
    monkeypatch.setenv("SHMBRIDGE_DEBUG", debug)
    try:
        raise LaneFull("no room", hint="wait")
    except LaneFull as error:
        refuse("shmbridge put", error, "not this hint")
    *before, line = capsys.readouterr().err.splitlines()
    assert line == "shmbridge put: error: [SB301] no room -> wait"
    assert bool(before) == (debug == "1")


@pytest.mark.parametrize("words", [["logs", "/nowhere"], ["launch", "/nowhere.yaml"], ["inspect", "nowhere"]])
@pytest.mark.parametrize("debug", [False, True])
def test_commands_refuse_in_one_line(capsys, monkeypatch, words, debug) -> None:
    from shmbridge.cli import main

    monkeypatch.setenv("SHMBRIDGE_DEBUG", "0")
    assert main([*words, *(["--debug"] if debug else [])]) != 0
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(f"shmbridge {words[0]}: error: ")
    if not debug:
        assert len(err.splitlines()) == 1


def test_a_line_without_an_end_costs_each_text_once_and_is_cut() -> None:
    """A child that prints dots for hours neither slows down nor fills the memory."""
    inner = io.StringIO()
    stream = StampedLines(inner, "env")
    began_s = time.process_time()
    for _ in range(40_000):
        stream.write("." * 50)
    stream.write("\n")
    assert time.process_time() - began_s < 2.0
    assert "".join(text for _, text in said(inner)) == "." * 2_000_000
    assert max(len(text) for _, text in said(inner)) <= 2**20 + 50


def test_text_that_is_no_unicode_does_not_end_the_program(tmp_path) -> None:
    code, log, _ = run('print("a\\udcff\\nb")', True, tmp_path, PYTHONIOENCODING="utf-8:strict")
    assert code == 3
    assert "INFO prog: a\\udcff" in log
    assert "INFO prog: b" in log


def json_lines(*words: str, **environment: str) -> tuple[int, list[dict]]:
    """Runs `shmbridge WORDS`; its exit code, and each line of both streams, which must be an object."""
    done = subprocess.run(
        [sys.executable, "-m", "shmbridge", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )
    return done.returncode, [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--bridge", "json-log", "--model", "/nowhere", "--steps", "1", "--json"),
        ("serve", "--model", "/nowhere", "--json"),
        ("env", "--bridge", "json-log", "--json", "/nowhere.py", "serve"),
    ],
)
def test_json_makes_every_line_of_a_program_an_object(words) -> None:
    code, said = json_lines(*words, SHMBRIDGE_LOG_NAME="mine")
    assert code != 0
    assert "/nowhere" in said[-1]["text"]
    assert {(each["name"], each["level"]) for each in said[-1:]} == {("mine", "ERROR")}
    assert all(each.keys() == {"time", "name", "level", "text"} for each in said)


def test_an_environments_own_json_is_its_own(tmp_path) -> None:
    script = tmp_path / "own.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    done = subprocess.run(
        [sys.executable, "-m", "shmbridge", "env", "--bridge", "json-log", str(script), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "['--json']\n"
