"""How far a run has come among its tasks, in a small file: a restarted environment goes on from there.

A task is over once its group is committed in the lane, or given up. The file is written at once. A process
that is killed between a commit and that write leaves a note of the group that it was about to commit, and its
lane, or the receipt of that lane, tells the next process whether it did.
"""

from __future__ import annotations

import fcntl
import json
import logging
from pathlib import Path
from typing import IO

from shmbridge import Producer
from shmbridge.errors import BadArgument
from shmbridge.segments import committed_here, forget_producer

log = logging.getLogger(__name__)

_FORMAT = 1


class Position:
    """The numbers of the tasks that are over. For one thread; make it before the producer, which removes
    lanes of earlier ones that are delivered.

    Args:
        file: written whole after each change, and locked until `close`; made if it is not there. None:
            nothing is kept.

    Raises:
        BadArgument: the file holds something else or cannot be written, or another process has it.
    """

    def __init__(self, file: str | Path | None) -> None:
        self._file = None if file is None else Path(file)
        self._lock: IO[str] | None = None
        self._next = 0  # all below are over
        self._beyond: set[int] = set()  # over, too
        self._note: tuple[int, int] | None = None  # number, sequence: about to be committed
        self._lane: tuple[str, str] | None = None  # bridge and id of the producer that commits
        if self._file is None:
            return
        try:
            self._lock = _locked(self._file)
            if self._file.exists():
                self._load(self._file)
            self._write()
        except OSError as error:
            raise BadArgument(f"{file} cannot be written: {error}", hint="give another file") from None

    def _load(self, file: Path) -> None:
        try:
            found = json.loads(file.read_bytes())
            if found["format"] != _FORMAT:
                raise ValueError
            self._next, self._beyond = int(found["next"]), set(map(int, found["beyond"]))
            if found["committing"] is not None:
                number, sequence = map(int, found["committing"])
                self._note = number, sequence
            if found["producer"] is not None:
                bridge, producer_id = map(str, found["producer"])
                self._lane = bridge, producer_id
        except (ValueError, KeyError, TypeError):
            raise BadArgument(
                f"{file} does not hold the position of a rollout in format {_FORMAT}",
                hint="give another file, or remove this one to begin with the first task",
            ) from None
        if self._lane is None:
            return
        records = committed_here(*self._lane)
        if records is None and self._note is not None and self._note[1] > 0:
            log.warning(
                "task %d is played again, and may be there already: its lane was removed", self._note[0]
            )
        self.settle(records or 0)

    def __contains__(self, number: int) -> bool:
        return number < self._next or number in self._beyond

    @property
    def tasks_over(self) -> int:
        """Tasks that are over."""
        return self._next + len(self._beyond)

    def begin(self, producer: Producer) -> None:
        """Notes which producer commits from now on. Blocks for the file."""
        if self._file is not None:
            producer.leave_receipt()
            self._lane = producer.bridge, producer.producer_id
            self._write()

    def committing(self, number: int, sequence: int) -> None:
        """Notes that the group of a task is about to be committed as a record. Blocks for the file."""
        self._note = number, sequence
        self._write()

    def settle(self, records: int) -> None:
        """Resolves a note that is left, by the records that its lane has in all, once the producer has ended.

        Blocks for the file.
        """
        if self._note is not None:
            number, sequence = self._note
            self._note = None
            if sequence < records:
                self.over(number)
        if self._lane is not None:
            forget_producer(*self._lane)

    def over(self, number: int) -> None:
        """Notes that a task is over. Blocks for the file."""
        if self._file is None:
            return
        if self._note is not None and self._note[0] == number:
            self._note = None
        self._beyond.add(number)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1
        self._write()

    def close(self) -> None:
        """Lets another process have the file."""
        if self._lock is not None:
            self._lock.close()

    def _write(self) -> None:
        if self._file is None:
            return
        new = self._file.with_name(self._file.name + ".new")
        words = {
            "next": self._next,
            "beyond": sorted(self._beyond),
            "committing": self._note,
            "producer": self._lane,
        }
        new.write_text(json.dumps({"format": _FORMAT, **words}))
        new.replace(self._file)


def _locked(file: Path) -> IO[str]:
    """The lock file beside the file, locked until it is closed or the process ends."""
    lock = file.with_name(file.name + ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise BadArgument(
            f"another process keeps its position in {file}", hint="give each environment a file of its own"
        ) from None
    return lock
