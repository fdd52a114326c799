"""A child that lives through hostile bytes, one plan after another; its death is a finding that names the
plan.
"""

import contextlib
import io
import itertools
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shmbridge
from shmbridge import cli

PATIENCE_S = 30.0
Report = dict[str, Any]


class Victim:
    """`ask(plan)` plays one plan in a child and returns its report; the child is started again after a
    death.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, **plan: Any) -> Report:
        plan["bridge"] = f"t-hostile-{os.getpid()}-{next(self._numbers)}"
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("victim.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(plan).encode() + b"\n")
        self._child.stdin.flush()
        line = self._line()
        if not line.endswith(b"\n"):
            code = self.end()
            shmbridge.clean(plan["bridge"], dry_run=False)
            raise AssertionError(
                f"the process that reads {'hung' if code == -9 else f'ended with {code}'}; plan: "
                f"{json.dumps(plan)}"
            )
        return {**json.loads(line), "plan": plan}

    def _line(self) -> bytes:
        """Returns its next line; less than a line if it ended or was silent for too long."""
        assert self._child is not None
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            return self._child.stdout.readline() if selector.select(PATIENCE_S) else b""

    def end(self) -> int:
        """Ends the child; its return code, -9 if it had to be killed."""
        child, self._child = self._child, None
        if child is None:
            return 0
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(2.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
        return child.returncode


@pytest.fixture(scope="session")
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.end()


@pytest.fixture(scope="session")
def survive(victim: Victim) -> Callable[..., Report]:
    """Plays a plan; only typed errors may be raised, no process may die, and the good lane's records come
    exactly once, in order.
    """

    def play(**plan: Any) -> Report:
        report = victim.ask(**plan)
        assert report["wrong"] == [], f"{report['wrong']}; plan: {json.dumps(report['plan'])}"
        good = report["good"]
        missing = plan.get("groups", 1) - 1  # groups that are too few for a batch stay behind
        # records that are there when the consumer starts are discarded
        first = 3 if plan.get("resume") == "discard" else 0
        wanted = list(range(first, 6))
        assert good in (wanted, wanted[: len(wanted) - missing]), (
            f"the good lane brought {good}; {json.dumps(report)}"
        )
        return report

    return play


@pytest.fixture
def look_around() -> Callable[[str], None]:
    """Inspects a bridge from outside in every way; none may raise."""

    def look(bridge: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            shmbridge.list_bridges()
            shmbridge.clean(bridge)
            for argv in (
                ["inspect", bridge, "--seconds", "0"],
                ["inspect", "--json"],
                ["clean", bridge],
                ["clean", bridge, "--json"],
            ):
                assert cli.main(argv) in (0, 3, 4), argv

    return look
