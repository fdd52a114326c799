"""How far a run has come among its tasks, in a small file: a restarted environment goes on from there.

A task is over once its group is committed in the lane, or given up. The file says so within the same turn of
the event loop; a process that is killed in that moment leaves a note of the group that it was about to
commit, and its lane tells the next one whether it did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shmbridge import list_bridges
from shmbridge.errors import BadArgument

_FORMAT = 1


class Position:
    """The numbers of the tasks that are over. For one thread; make it before the producer, which removes
    lanes of earlier ones that are delivered.

    Args:
        file: written whole after each change; made if it is not there. None: nothing is kept.

    Raises:
        BadArgument: the file is not such a position.
    """

    def __init__(self, file: str | Path | None) -> None:
        self._file = None if file is None else Path(file)
        self._next = 0  # all below are over
        self._beyond: set[int] = set()  # over, too
        self._note: list[Any] | None = None  # number, producer_id, sequence: about to be committed
        if self._file is not None and self._file.exists():
            self._load(self._file)

    def _load(self, file: Path) -> None:
        try:
            said = json.loads(file.read_bytes())
            if said["format"] != _FORMAT:
                raise ValueError
            self._next, self._beyond = int(said["next"]), set(map(int, said["beyond"]))
            if (note := said["committing"]) is not None:
                number, producer, sequence = int(note[0]), str(note[1]), int(note[2])
                lanes = (lane for bridge in list_bridges() for lane in bridge.lanes)
                if any(lane.producer_id == producer and lane.records > sequence for lane in lanes):
                    self.over(number)
        except (ValueError, KeyError, TypeError, IndexError):
            raise BadArgument(
                f"{file} is no position of a rollout of format {_FORMAT}",
                hint="give another file, or remove this one to begin with the first task",
            ) from None

    def __contains__(self, number: int) -> bool:
        return number < self._next or number in self._beyond

    @property
    def tasks_over(self) -> int:
        """Tasks that are over."""
        return self._next + len(self._beyond)

    def committing(self, number: int, producer_id: str, sequence: int) -> None:
        """Notes that the group of a task is about to be committed as a record. Blocks for the disk."""
        self._note = [number, producer_id, sequence]
        self._write()

    def over(self, number: int) -> None:
        """Notes that a task is over. Blocks for the disk."""
        self._note = None
        self._beyond.add(number)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        new = self._file.with_name(self._file.name + ".new")
        words = {"next": self._next, "beyond": sorted(self._beyond), "committing": self._note}
        new.write_text(json.dumps({"format": _FORMAT, **words}))
        new.replace(self._file)
