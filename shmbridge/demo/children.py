"""The demo's child processes: one log file each, none of which outlives the demo.

Knows nothing of models, rewards and bridges. Called by `demo.py`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shmbridge.launch import guardian

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

ORDERLY_S = 8.0  # time for a child to end by itself


class Child:
    """One program, and the signal that ends it orderly.

    Args:
        name: of the child in the demo, and of its log file.
        command: program and arguments.
        logs: folder of the log file; output of a restarted program is appended.
        stop_signal: SIGINT for programs that clean up on Ctrl-C only.
        guarded: for programs that start processes of their own: these end with it, however it ends.
        surroundings: environment variables besides the demo's own.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        logs: Path,
        stop_signal: signal.Signals = signal.SIGTERM,
        *,
        guarded: bool = False,
        surroundings: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self.stop_signal = stop_signal
        self.restarts = 0
        self.guarded = guarded
        self._surroundings = dict(surroundings or {})
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs or has not been started."""
        return self._process.poll() if self._process else None

    @property
    def pid(self) -> int:
        """The pid of the process that was started last, or of its guardian; 0: none was."""
        return self._process.pid if self._process else 0

    @property
    def killed_by(self) -> signal.Signals | None:
        """The signal that ended it, if one did. A guardian reports its program's signal as shells do."""
        status = self.status or 0
        number = status - 128 if self.guarded and status > 128 else -status
        return signal.Signals(number) if number > 0 else None

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, *more: str) -> None:
        """Starts it, with further arguments; never blocks."""
        words = [*self._command, *more]
        if self.guarded:
            parent, death_signal = str(os.getpid()), str(int(signal.SIGKILL))
            words = [
                sys.executable,
                "-I",
                "-S",
                guardian.__file__,
                parent,
                death_signal,
                os.getcwd(),
                self.name,
                *("", "0"),  # its output goes where the guardian's goes
                *words,
            ]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                words,
                env=os.environ | self._surroundings | {"SHMBRIDGE_LOG_NAME": self.name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C on the terminal is for the demo alone
                preexec_fn=functools.partial(_die_with, os.getpid()),
            )

    def restart(self, *more: str) -> None:
        """Starts it again after its death."""
        self.restarts += 1
        self.start(*more)

    def send(self, signum: signal.Signals) -> None:
        """Signals its whole process group; harmless once it has ended."""
        if self.running and self._process is not None:
            os.killpg(self._process.pid, signum)

    def wait_killed(self) -> None:
        """Waits for the end of a killed child."""
        if self._process is not None:
            self._process.wait()

    def last_words(self, lines: int = 12) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def stop(stages: Iterable[Sequence[Child]], hurry: Callable[[], bool]) -> list[str]:
    """Ends children, orderly if they can; returns the names of those that had to be killed.

    Blocks up to `ORDERLY_S` per stage, less once `hurry` is true. A stage begins when the one before is over.
    """
    killed = []
    for stage in stages:
        for child in stage:
            child.send(child.stop_signal)
        deadline = time.monotonic() + ORDERLY_S
        while any(child.running for child in stage) and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)
        for child in stage:
            if child.running:
                child.send(signal.SIGKILL)
                child.wait_killed()
                killed.append(child.name)
    return killed


def adopt_orphans() -> None:
    """Makes processes left behind by a killed program and its killed guardian children of this process."""
    guardian.adopt_orphans()


def end_orphans(own: Iterable[int]) -> None:
    """Kills the children of this process but its `own`, and theirs; blocks until they are gone."""
    guardian.sweep(list(own))


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the demo's is gone, however it went."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the demo ended before the line above
        os._exit(1)
