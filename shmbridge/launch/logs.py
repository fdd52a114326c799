"""The logs of a run's services, merged in the order of time; and what they go on to say."""

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shmbridge.log_format import stamp_of

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


class LogFile:
    """Reads one log from its beginning, as far as its lines are complete."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._read_to, self._time = 0, ""

    def read(self, *, to_the_end: bool = False) -> Iterator[LogLine]:
        """Yields the lines since the last call; `to_the_end`: also one that has no end yet."""
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._read_to:  # cut by log rotation
                self._read_to = 0
            file.seek(self._read_to)
            for raw in file:
                if not (to_the_end or raw.endswith(b"\n")):
                    return
                self._read_to += len(raw)
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
