"""What the commands that watch print: to a reader that ends early, in any encoding, and of wrong names."""

import os
import subprocess
import sys

import pytest

from shmbridge.cli import main

COMMANDS = [
    ("inspect", "BRIDGE", "--seconds", "0"),
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


@pytest.mark.parametrize("arguments", COMMANDS[:1])
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


def test_tail_of_an_environment_that_has_no_lane(bridge, put, capsys):
    assert main(["tail", bridge, "--no-follow", "--env", "math"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "no lane of environment 'math' yet; there are: 漢字" in said.err
