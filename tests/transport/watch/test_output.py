"""What the commands that watch print: to a reader that ends early, in any encoding, and of wrong names."""

import os
import subprocess
import sys

import pytest

from shmbridge.cli import main

COMMANDS = [
    ("inspect", "BRIDGE", "--seconds", "0"),
    ("inspect", "BRIDGE", "--json"),
    ("inspect", "BRIDGE", "--prometheus"),
    ("top", "BRIDGE", "--once", "--interval", "10ms"),
    ("top", "BRIDGE", "--json", "--interval", "10ms"),
    ("tail", "BRIDGE", "--no-follow"),
    ("doctor",),
]


@pytest.fixture
def put(make_producer):
    make_producer(env_name="漢字").put({"tokens": [[1]], "scores": [0.5]})


def started(bridge, arguments, **options):
    words = [bridge if each == "BRIDGE" else each for each in arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "shmbridge.cli", *words], stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(bridge, put, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with started(bridge, arguments, stdout=writer) as done:
        os.close(writer)
        assert done.wait(60) in ((0, 1, 2) if arguments == ("doctor",) else (0,))
        assert done.stderr.read() == ""


@pytest.mark.parametrize("arguments", [each for each in COMMANDS if "--once" in each or "--seconds" in each])
def test_an_encoding_without_these_characters(bridge, put, arguments):
    with started(
        bridge, arguments, stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    ) as done:
        assert "\\u6f22" in done.stdout.read()
        assert (done.wait(30), done.stderr.read()) == (0, "")


def test_tail_notices_that_its_reader_has_gone_without_another_record(bridge, put):
    with started(bridge, ("tail", "BRIDGE"), stdout=subprocess.PIPE) as tail:
        assert "漢字" in tail.stdout.readline()
        tail.stdout.close()
        assert (tail.wait(10), tail.stderr.read()) == (0, "")


@pytest.mark.parametrize("command", ["inspect", "top", "tail"])
def test_a_bridge_that_is_not_there_names_those_that_are(bridge, put, command, capsys):
    assert main([command, "no-such-bridge"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"shmbridge {command}: error: no bridge 'no-such-bridge' -> there are ")


@pytest.mark.parametrize("command", ["inspect", "top", "tail"])
def test_a_name_that_no_bridge_can_have(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "a b"])
    assert "[SB100]" in capsys.readouterr().err


def test_a_count_of_records_is_not_negative(bridge, put, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tail", bridge, "-n", "-1"])
    assert ended.value.code == 2
    assert "-n: '-1' is not a whole number of 0 or above" in capsys.readouterr().err


def test_tail_of_an_environment_that_has_no_lane(bridge, put, capsys):
    assert main(["tail", bridge, "--no-follow", "--env", "math"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "no lane of environment 'math' yet; there are: 漢字" in said.err
