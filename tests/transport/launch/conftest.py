"""Runs of fake services under the real guardian and supervisor, observed from outside."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shmbridge.launch.config import Restart
from shmbridge.launch.plan import Check, Plan, Service
from shmbridge.testing import json_lines

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATIENCE_S = 100.0


def processes() -> dict[int, tuple[str, int]]:
    """pid -> (state, parent) of everything that runs, zombies included."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(entry.name)] = (fields[0].decode(), int(fields[1]))
    return found


def alive(pid: int) -> bool:
    return processes().get(pid, ("Z", 0))[0] != "Z"


class Launch:
    """A launch in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.notes_file = folder / "notes"
        self.process: subprocess.Popen | None = None
        self.log_bytes = 64 << 20
        self._output = folder / "output"
        self._errors = folder / "errors"

    def service(
        self, name, *flags, role="environment", http=None, within_s=0.1, grace_s=5.0, restart=None
    ) -> Service:
        words = [
            sys.executable,
            "-S",
            str(HERE / "fake.py"),
            "--name",
            name,
            "--notes",
            str(self.notes_file),
            *map(str, flags),
        ]
        check = Check(kind="alive", within_s=within_s)
        if http:
            words += ["--port", str(http)]
            check = Check(kind="http", url=f"http://127.0.0.1:{http}/health", within_s=within_s)
        if role == "environment":
            restart = restart or Restart(first_delay=0.05)
        return Service(
            name=name, role=role, key=name, command=words, check=check, stop_grace_s=grace_s, restart=restart
        )

    def start(self, *stages, form="json", before=(), **popen) -> "Launch":
        """`before`: the words of a command that becomes the launcher."""
        path = self.folder / "wanted.json"
        Plan(
            bridge=f"launch-{os.getpid()}-{self.folder.name[:30]}",
            run_dir=str(self.run_dir),
            stages=list(stages),
            log_bytes=self.log_bytes,
        ).save(path)
        return self.command(sys.executable, self.script, str(path), form, before=before, **popen)

    def command(self, *words, before=(), **popen) -> "Launch":
        with self._output.open("ab") as output, self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*before, *words],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                **{"stdout": output, "stderr": errors} | popen,
            )
        return self

    script = str(HERE / "run_plan.py")

    @staticmethod
    def free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def events(self) -> list[dict]:
        return json_lines(self.run_dir / "events.jsonl")

    def said(self, event, service=None) -> list[dict]:
        return [
            each
            for each in self.events
            if each["event"] == event and (service is None or each.get("service") == service)
        ]

    @property
    def notes(self) -> list[tuple[str, str, int]]:
        """(name, action, pid) of each action of the fake services, in order."""
        lines = self.notes_file.read_text().splitlines() if self.notes_file.exists() else []
        return [(name, what, int(pid)) for name, what, pid in (line.split() for line in lines)]

    def noted(self, what) -> list[str]:
        return [name for name, each, _ in self.notes if each == what]

    def started_pids(self) -> list[int]:
        """The pids of all fake services, and of the processes they left behind."""
        return [pid for _, what, pid in self.notes if what in ("start", "stray")]

    def supervisor(self) -> int:
        def found():
            return [pid for pid in self._children(self.pid) if b"launch.supervisor" in self._words(pid)]

        self.until(found)
        return found()[0]

    def guardians(self) -> list[int]:
        return self._children(self.supervisor())

    def zombies(self, parent) -> list[int]:
        return [pid for pid, (state, its) in processes().items() if its == parent and state == "Z"]

    @staticmethod
    def _children(parent) -> list[int]:
        return [pid for pid, (_, its) in processes().items() if its == parent]

    @staticmethod
    def _words(pid) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    def until(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.events}\n{self.errors}\n{self.notes}"
            time.sleep(0.02)

    def until_up(self):
        """Waits until all are up, and each handles signals."""
        self.until(lambda: any(each["event"] == "up" and "service" not in each for each in self.events))
        plan = Plan.load(self.run_dir / "plan.json")
        self.until(lambda: {each.name for each in plan.services} == set(self.noted("start")))
        self.until(
            lambda: (
                {each.name for each in plan.services if "--stray" in each.command} == set(self.noted("stray"))
            )
        )

    def send(self, signum):
        self.process.send_signal(signum)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def until_nothing_lives(self):
        self.until(lambda: not [pid for pid in self.started_pids() if alive(pid)])
        self.until(lambda: not [pid for pid in processes() if str(self.folder).encode() in self._words(pid)])

    def end(self):
        """Ends every process of the run, for a test that failed half-way."""
        if self.process:
            for pid in [*self._children(self.pid), *self.started_pids()]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.kill()
            self.process.wait()


@pytest.fixture
def launch(tmp_path):
    it = Launch(tmp_path)
    yield it
    it.end()
