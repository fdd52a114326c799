"""The live view of real processes: the words of inspect, their records, and no trace of having looked."""

import json
import os
import re
import signal
import sys

import pytest

pytest.importorskip("textual")

from textual.widgets import Static

from shmbridge import cli
from shmbridge.testing import wait_until
from shmbridge.watch import diagnosis
from shmbridge.watch.lane_table import LaneList
from shmbridge.watch.snapshot import State, look
from shmbridge.watch.top import Top

ENVIRONMENT = """
import shmbridge, sys
producer = shmbridge.Producer(bridge, env_name="gsm8k", lane_bytes="64K")
producer.put({"tokens": [[1, 2, 3]], "advantages": [[0.0, 0.5, -0.5]], "scores": [0.5]})
print("ready", flush=True)
sys.stdin.read()
"""
LEARNER = """
import shmbridge, sys
consumer = shmbridge.Consumer(bridge)
held = consumer.get(10)
print("ready", flush=True)
consumer.get(60)
"""


def without_times(text: str) -> str:
    return re.sub(r"[\d.]+ (s|min)\b", "N s", text)


async def test_a_stopped_environment_is_said_as_inspect_says_it(bridge, child, capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "LONG_S", 0.2)
    environment = child(ENVIRONMENT)
    learner = child(LEARNER)
    os.kill(environment.pid, signal.SIGSTOP)
    wait_until(
        lambda: look(bridge).lanes[0].state is State.STOPPED and (look(bridge).consumer.asking_s or 0) > 0.3
    )
    assert cli.main(["inspect", bridge, "--seconds", "0"]) == 0
    inspected = capsys.readouterr().out.splitlines()[1].strip()
    app = Top(bridge, interval_s=3600)
    async with app.run_test(size=(80, 24)) as pilot:
        said = str(app.query_one("#said", Static).content)
        assert without_times(said) == without_times(inspected)
        assert "gsm8k" in said
        assert f"kill -CONT {environment.pid}" in said
        assert "stopped" in app.query_one(LaneList).render_line(1).text
        await pilot.press("enter")
        facts = str(app.screen.query_one("#facts", Static).content)
        tokens = str(app.screen.query_one("#tokens", Static).content)
        assert "3 tokens" in facts
        assert tokens == "1 ⁺2 ⁻3"
        await pilot.press("escape")
    now = look(bridge)
    assert (now.held, now.consumer.pid) == (1, learner.pid)  # nothing was taken, nothing released


def test_one_screen_json_and_exit_codes(bridge, child, capsys):
    environment = child(ENVIRONMENT)
    assert cli.main(["top", bridge, "--once", "--interval", "20ms"]) == 0
    assert f"{bridge}  1 lane," in capsys.readouterr().out
    assert cli.main(["top", bridge, "--once", "--json", "--interval", "20ms"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert said["headline"].startswith("no consumer: 1 record waits")
    [lane] = said["lanes"]
    assert (lane["pid"], lane["held"], lane["state"], lane["rate"]) == (environment.pid, 1, "running", 0.0)
    assert said["environments"][0]["env_name"] == "gsm8k"
    assert cli.main(["top", "no-such-bridge"]) == 3
    assert "no bridge 'no-such-bridge'" in capsys.readouterr().err


def test_without_textual_it_names_the_extra(bridge, make_producer, capsys, monkeypatch):
    make_producer()
    for name in [
        each for each in sys.modules if each.startswith(("shmbridge.watch.top", "shmbridge.watch.lane_table"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert cli.main(["top", bridge]) == 1
    assert "pip install 'shmbridge[tui]'" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "-1s", "soon", "1h"])
def test_an_interval_is_a_time(wrong, capsys):
    with pytest.raises(SystemExit):
        cli.main(["top", f"--interval={wrong}"])
    assert "1s, 500ms or 2min" in capsys.readouterr().err
