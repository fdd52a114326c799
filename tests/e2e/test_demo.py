"""The demo as a user runs it: it reaches its end over kills, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmbridge.testing import json_lines

# Several processes start and learn in one test: the timeout for hangs is longer than elsewhere.
pytestmark = pytest.mark.timeout(400)

pytest.importorskip("torch")
pytest.importorskip("atroposlib")

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
PATIENCE_S = 200.0


class Run:
    """A demo in a folder of its own, and what can be seen of it from outside."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.run_dir = folder / "run"
        self._output = folder / "demo.log"
        command = [sys.executable, "-m", "shmbridge", "demo", "--run-dir", str(self.run_dir), *flags]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=folder, env=os.environ | {"PYTHONPATH": PYTHONPATH}
            )
        self.bridge = f"demo-{self.process.pid}"

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def steps(self) -> list[int]:
        return [line["step"] for line in json_lines(self.run_dir / "metrics.jsonl")]

    def members(self, what: str = "") -> list[int]:
        """Processes, apart from the demo itself, whose command line names its bridge and `what`."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if self.bridge in command.split() and what in command:
                    found.append(int(entry.name))
        return found

    def segments(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if f".{self.bridge}." in name]

    def wait_until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return value

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def demo(folder: Path, *flags: str) -> Iterator[Run]:
    run = Run(folder, *flags)
    try:
        yield run
        run.wait_until(lambda: not run.members() and not run.segments())
    finally:
        run.process.kill()  # its supervisor ends the others and removes the bridge
        run.process.wait(30)


def test_the_demo_trains_on_over_a_killed_learner_and_tells_the_truth_at_the_end(tmp_path):
    with demo(tmp_path, "--steps", "30") as run:
        run.wait_until(lambda: run.steps[-1:] >= [12])
        learner = max(run.members("consumers.grpo"))  # the other one is its guardian
        os.kill(learner, signal.SIGKILL)
        status = run.wait()

        assert "learner: ended with status 137 (SIGKILL); starting again" in run.output
        assert run.steps[-1] == 30
        assert 11 in run.steps[12:]  # it went on from the checkpoint of step 10
        assert re.search(r"restarted +learner 1x", run.output)
        assert re.search(r"dropped +0\n", run.output)
        assert re.search(r"leaked +0\n", run.output)
        for env in ("larger_digit", "echo_letters"):
            assert (run.run_dir / f"rewards-{env}.jsonl").stat().st_size > 0
        assert (run.run_dir / "rewards.png").stat().st_size > 10_000
        # thirty steps are too few for the goal, and the demo must say so
        assert status == 1
        assert "which is less than 0.3" in run.output
        assert not run.members()
        assert not run.segments()


@pytest.mark.parametrize("moment", [pytest.param("at once", marks=pytest.mark.long), "while it learns"])
def test_ctrl_c_leaves_no_process_and_no_segment(tmp_path, moment):
    with demo(tmp_path) as run:
        ready = {"at once": lambda: "Ctrl-C ends it" in run.output, "while it learns": lambda: run.steps}
        run.wait_until(ready[moment])
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert "segments left: 0" in run.output
        assert "Traceback" not in run.output
        assert not run.members()
        assert not run.segments()


@pytest.mark.long  # tests/transport/launch/test_orphans.py kills a launcher in every run
def test_a_killed_demo_takes_everything_with_it(tmp_path):
    with demo(tmp_path) as run:
        run.wait_until(lambda: run.steps)
        assert len(run.members()) == 8  # server, learner, two environments, each with its guardian
        assert run.segments()
        run.process.kill()
        run.wait()
        run.wait_until(lambda: not run.members() and not run.segments())


@pytest.mark.parametrize(
    "flags",
    [
        ["--env", "nowhere.py"],
        pytest.param(["--model", "no/such/nowhere"], marks=pytest.mark.long),
        pytest.param(["--engine", "vllm", "--engine-python", "nowhere/python"], marks=pytest.mark.long),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, flags):
    with demo(tmp_path, *flags) as run:
        assert run.wait() in (1, 2)
        assert "nowhere" in run.output
        assert "Traceback" not in run.output
