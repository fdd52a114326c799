"""Builds shmbridge with fail-points from a source tree, next to the installed package.

faults.py has the labels and the children that die on one. Imported by tests only.
"""

import difflib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SOURCES = {".py", ".pyx", ".pxi", ".pxd", ".h", ".c"}


def fault_build(source_tree: str | os.PathLike[str], into: str | os.PathLike[str]) -> Path:
    """Builds shmbridge with fail-points, if a source is newer than the last such build; returns the folder
    for a child's PYTHONPATH.

    Blocks for the build (about a minute), and while another process builds into the same folder. Needs Cython
    and a C compiler.

    Args:
        source_tree: a clone or an unpacked source archive: the folder of setup.py.
        into: folder of the package; created if missing. Objects go beside it, in `<into>-base`.

    Raises:
        FileNotFoundError: there is no setup.py.
        RuntimeError: the build failed; the message ends with the compiler's output.
    """
    tree, folder = Path(source_tree).resolve(), Path(into).resolve()
    if not (tree / "setup.py").is_file():
        raise FileNotFoundError(f"{tree} has no setup.py: a build with fail-points needs shmbridge's sources")
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / ".built"
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = _newest_source(tree)
        if not stamp.exists() or stamp.stat().st_mtime < began:
            _build(tree, folder)
            stamp.touch()
            os.utime(stamp, (began, began))
    return folder


def _build(tree: Path, folder: Path) -> None:
    build = ["build", "--build-base", f"{folder}-base", "--build-lib", str(folder), "build_ext", "-j2"]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *build],
        cwd=tree,
        env={**os.environ, "SHMBRIDGE_FAULTS": "1", "CFLAGS": "-O1"},  # compiles in half the time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the build with fail-points failed:\n{done.stdout[-4000:]}")
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", str(folder)], check=False, stdout=subprocess.DEVNULL
    )


def _newest_source(tree: Path) -> float:
    sources = [tree / "setup.py", tree / "pyproject.toml"]
    for package in ("shmbridge", "producers", "consumers"):
        sources += [
            path
            for path in (tree / package).rglob("*")
            if path.suffix in _SOURCES and not _is_generated(path)
        ]
    return max(path.stat().st_mtime for path in sources)


def _is_generated(path: Path) -> bool:
    return path.suffix == ".c" and path.with_suffix(".pyx").exists()


# Per role, in the order in which a run passes them.
CREATING_CONTROL = ("control.locked", "control.before_magic")
CREATING_LANE = (
    "segment.created",
    "segment.locked",
    "segment.reserved",
    "lane.before_magic",
    "lane.after_magic",
)
BEFORE_COMMIT = (
    "producer.claimed",
    "producer.payload_written",
    "producer.body_written",
    "producer.generation_stored",
    "producer.ring_written",
    "producer.before_tail",
)
AFTER_COMMIT = ("producer.committed", "producer.woken_hub")
WAITING_FOR_SPACE = ("producer.waiting",)
ASKING_FOR_TICKETS = ("ticket.granted", "ticket.shown")
GRANTING_TICKETS = ("hub.ticket_promised",)
ENTERING_HUB = ("hub.locked", "hub.adopting")
TAKING = ("hub.read", "hub.marked")
RELEASING = ("hub.releasing", "hub.released")
QUARANTINING = ("hub.quarantining", "hub.quarantined")
HUB_SLEEPING = ("hub.before_sleep",)
STARTING_RUN = ("hub.start_changing", "hub.start_stored")
ENDING_HUB = ("hub.ending", "hub.forming_over", "hub.leases_over", "hub.lanes_closed", "hub.left")
SERVING_RANKS = ("hub.share_issued", "hub.share_done")
RANK_JOINING = ("rank.locked", "rank.epoch_loaded", "rank.epoch_locked", "rank.joined")
RANK_READING = ("rank.looking", "rank.holding", "rank.told_done")
SWEEPING = ("segment.unlinking",)
RECEIPTS = ("receipt.created", "receipt.written")
NOTING_ORIGIN = ("producer.origin_noted",)
WEIGHTS = (
    "weights.before_magic",
    "weights.filling",
    "weights.numbered",
    "weights.filled",
    "weights.stamped",
    "weights.slot_whole",
    "weights.committed",
)
WEIGHTS_REPLACING = ("weights.floor_raised", "weights.removed", "weights.created")
WEIGHTS_TENSORS = ("weights.tensor_written",)
WEIGHTS_FILLING = ("weights.parts_refused",)
WEIGHTS_PARTS = ("weights.part_locked", "weights.part_written", "weights.part_counted")
WEIGHTS_READING = ("weights.leased",)

STORING = ("values.created", "values.locked", "values.written", "values.committed")
CLEARING = ("values.released",)

# Every label, per role that passes it.
LABELS: Mapping[str, tuple[str, ...]] = {
    "anyone": CREATING_CONTROL + RECEIPTS + SWEEPING,
    "producer": CREATING_LANE
    + BEFORE_COMMIT
    + NOTING_ORIGIN
    + AFTER_COMMIT
    + WAITING_FOR_SPACE
    + ASKING_FOR_TICKETS,
    "hub": ENTERING_HUB
    + TAKING
    + RELEASING
    + QUARANTINING
    + HUB_SLEEPING
    + SERVING_RANKS
    + GRANTING_TICKETS
    + STARTING_RUN
    + ENDING_HUB,
    "rank": RANK_JOINING + RANK_READING,
    "weights writer": WEIGHTS_REPLACING + WEIGHTS + WEIGHTS_TENSORS + WEIGHTS_FILLING,
    "weights part": WEIGHTS_PARTS,
    "weights reader": WEIGHTS_READING,
    "values writer": STORING,
    "whoever clears values": CLEARING,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One armed label: the process passes it `skip` times, then raises `signal_number` against itself.

    ValueError for a label that is not in LABELS, since it would never be reached.
    """

    label: str
    skip: int = 0
    signal_number: int = signal.SIGKILL

    def __post_init__(self) -> None:
        if not any(self.label in labels for labels in LABELS.values()):
            near = difflib.get_close_matches(
                self.label, [label for labels in LABELS.values() for label in labels], n=3
            )
            raise ValueError(
                f"no fail-point is called {self.label!r}"
                + (f"; did you mean {' or '.join(near)}?" if near else "")
            )

    def __str__(self) -> str:
        return f"{self.label}:{self.skip}:{int(self.signal_number)}"


class FaultyChild:
    """A Python child that imports the build with fail-points and may die on one.

    Its standard output is read line by line.

    A context manager: the child never outlives the block. For one thread.

    Args:
        argv: arguments after the interpreter; the child runs in `/`, so paths are absolute.
        build: folder into which the build with fail-points was installed; nothing else is on the child's
            PYTHONPATH.
        fault: the armed fault, or None.
        environment: more variables for the child.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        build: str | os.PathLike[str],
        fault: Fault | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        variables = {
            **os.environ,
            **(environment or {}),
            "PYTHONPATH": os.fspath(build),
            "PYTHONUNBUFFERED": "1",
        }
        variables.pop("SHMBRIDGE_FAULT", None)
        if fault is not None:
            variables["SHMBRIDGE_FAULT"] = str(fault)
        self.fault = fault
        self.process = subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, cwd="/"
        )
        self.said: list[str] = []
        self._rest = b""

    @property
    def pid(self) -> int:
        """Pid of the child."""
        return self.process.pid

    def line(self, timeout_s: float = 20.0) -> str | None:
        """Returns the next line of its output; None at the end of the output.

        AssertionError after `timeout_s` seconds of silence.
        """
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise AssertionError(
                        f"child {self.pid} ({self.fault}) printed nothing for {timeout_s} s after "
                        f"{self.said[-3:]}"
                    )
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return None
                self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        self.said.append(line.decode())
        return self.said[-1]

    def until(self, wanted: str, timeout_s: float = 20.0) -> None:
        """Reads until it has printed `wanted`; AssertionError if it ends first."""
        while (line := self.line(timeout_s)) != wanted:
            assert line is not None, (
                f"child {self.pid} ({self.fault}) ended before {wanted!r}: {self.said[-3:]}"
            )

    def tell(self, line: str = "") -> None:
        """Writes one line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end(self, timeout_s: float = 20.0) -> int:
        """Reads the rest of its output, waits for its end, and returns the return code: minus the signal if
        one killed it.
        """
        while self.line(timeout_s) is not None:
            pass
        return self.process.wait(timeout_s)

    def end_on_fault(self, timeout_s: float = 20.0) -> None:
        """As `end`, but asserts that the armed fault ended it."""
        code = self.end(timeout_s)
        assert self.fault is not None
        assert code == -self.fault.signal_number, (
            f"child ended with {code}, not on {self.fault}: {self.said[-3:]}"
        )

    def wait_stopped(self, timeout_s: float = 20.0) -> None:
        """Waits until a signal has stopped it; AssertionError if it ends or continues."""
        deadline = time.monotonic() + timeout_s
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid:
                assert os.WIFSTOPPED(status), (
                    f"child ended with status {status:#x}, not on {self.fault}: {self.said[-3:]}"
                )
                return
            assert time.monotonic() < deadline, (
                f"child {self.pid} did not reach {self.fault} within {timeout_s} s: {self.said[-3:]}"
            )
            time.sleep(0.002)

    def go_on(self) -> None:
        """Sends SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end. Does nothing if it has ended."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
