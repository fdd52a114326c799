"""The logs of a run's services, merged in the order of time; and what they go on to say."""

import contextlib
import heapq
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shmbridge.cli.log import stamp_of

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; one without a stamp of its own (another program's) has the time of the line before it."""

    time: str
    name: str  # of the service
    level: str | None
    text: str  # the whole line


def log_files(run_dir: Path) -> dict[str, Path]:
    """Returns the log of each service by name: RUN_DIR/logs/NAME.log, or RUN_DIR/NAME.log."""
    found = sorted((run_dir / "logs").glob("*.log")) or sorted(run_dir.glob("*.log"))
    return {path.stem: path for path in found}


def log_parts(log: Path) -> list[Path]:
    """Returns the files of a log that there are, oldest first; see `guardian.Log`."""
    parts = [log.with_name(f"{log.name}{end}") for end in (".first", ".1", "")]
    return [part for part in parts if part.exists()]


class LogFile:
    """Reads one log, of one or several parts, from its beginning, as far as its lines are complete."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._read_to: dict[int, int] = {}  # by the number of the file, which keeps it when it is renamed
        self._time = ""

    def read(self, *, to_the_end: bool = False) -> Iterator[LogLine]:
        """Yields the lines since the last call; `to_the_end`: also one that has no end yet."""
        with contextlib.ExitStack() as opened:
            files: dict[int, BinaryIO] = {}
            for part in reversed(
                log_parts(self._path)
            ):  # newest first: a part that is renamed meanwhile is seen
                with contextlib.suppress(FileNotFoundError):
                    file = opened.enter_context(part.open("rb"))
                    files.setdefault(os.fstat(file.fileno()).st_ino, file)
            self._read_to = {number: self._read_to.get(number, 0) for number in reversed(files)}
            for number in self._read_to:
                yield from self._lines(files[number], number, to_the_end)

    def _lines(self, file: BinaryIO, number: int, to_the_end: bool) -> Iterator[LogLine]:
        if file.seek(0, 2) < self._read_to[number]:  # cut by log rotation
            self._read_to[number] = 0
        file.seek(self._read_to[number])
        for raw in file:
            if not (to_the_end or raw.endswith(b"\n")):
                return
            self._read_to[number] += len(raw)
            text = raw.decode(errors="replace").rstrip("\n").rpartition("\r")[2]
            stamp = stamp_of(text)
            self._time = stamp["time"] if stamp else self._time
            yield LogLine(self._time, self.name, stamp["level"] if stamp else None, text)


def merged(files: list[LogFile]) -> Iterator[LogLine]:
    """Yields all lines that are there, in the order of their times."""
    return heapq.merge(*(file.read(to_the_end=True) for file in files), key=lambda line: line.time)


def followed(files: list[LogFile]) -> Iterator[LogLine]:
    """Yields all lines that are there, then each new one. Never ends by itself."""
    while True:
        yield from heapq.merge(*(file.read() for file in files), key=lambda line: line.time)
        time.sleep(_LOOK_S)
