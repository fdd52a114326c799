"""The position of a data set: the records it has handed out, and those that would be redelivered after a
crash.

Used by `dataset.py`.

A state lists the records that were handed out and may be redelivered: those whose lease has not ended in this
process, and those of the loaded state that their lanes do not show as released.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmbridge.consumers.dataset_parts.lane_records import HeldRecords

_FORMAT = 1
_COUNTS = ("items", "rows", "tokens")

Place = tuple[str, int]  # producer_id, sequence


class Position:
    """The records handed out so far, in this process and in those whose state it has loaded."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.skipped = 0  # rows that came again, and that the loaded state had already
        self._held: dict[Place, int] = {}  # rows handed out of each record whose lease has not ended
        self._newest: dict[str, int] = {}  # highest sequence handed out, by producer
        # rows handed out of each record of the loaded state, whether it has come again or not
        self._had: dict[Place, int] = {}
        self._mounts: dict[str, str] = {}  # of the lanes of those, by producer
        self._loaded_newest: dict[str, int] = {}
        self._first_after: dict[str, int] = {}  # lowest sequence behind the loaded one, by producer

    def took(self, place: Place, rows: int) -> None:
        """Count rows of a record as handed out."""
        producer, sequence = place
        self._held[place] = self._held.get(place, 0) + rows
        self._newest[producer] = max(self._newest.get(producer, -1), sequence)
        if sequence > self._loaded_newest.get(producer, sequence):
            self._first_after[producer] = min(self._first_after.get(producer, sequence), sequence)

    def ended(self) -> None:
        """The leases of all records handed out so far have ended."""
        for place in self._held:
            self._had.pop(place, None)
        self._held.clear()

    def rows_had(self, place: Place) -> int:
        """Returns how many rows of a record the loaded state had been given; they are not to be handed out
        again.
        """
        return self._had.get(place, 0)

    @property
    def gone(self) -> int:
        """Records between the loaded state and what came after it: consumed by a process that saved no state
        since, or discarded.
        """
        return sum(first - self._loaded_newest[producer] - 1 for producer, first in self._first_after.items())

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as lists, numbers and words. Looks at lanes; never blocks."""
        left = HeldRecords.of(self._had, self._mounts).that_may_come_again()
        left |= HeldRecords.of(self._held)
        rows = self._had | self._held
        held = [
            [name, number, rows[name, number]] for name in left.held for number in sorted(left.held[name])
        ]
        return {
            "format": _FORMAT,
            **self.counts,
            "held": held,
            "mounts": left.mounts,
            "newest": dict(self._newest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position.

        Raises:
            ValueError: it is none, or one of another format.
        """
        names = list(state) if isinstance(state, Mapping) else [type(state).__name__]
        wanted = {"format", *_COUNTS, "held", "newest"}
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT or not wanted <= state.keys():
            raise ValueError(
                f"this is no state of a BridgeDataset of format {_FORMAT}: it has "
                f"{', '.join(map(str, names)) or 'nothing'}"
            )
        self.counts = {name: int(state[name]) for name in _COUNTS}
        self._had = {(producer, int(sequence)): int(rows) for producer, sequence, rows in state["held"]}
        self._mounts = dict(state.get("mounts", {}))  # what an earlier release wrote has none
        self._loaded_newest = {producer: int(sequence) for producer, sequence in state["newest"].items()}
        self._newest = dict(self._loaded_newest)
        self._held, self._first_after, self.skipped = {}, {}, 0
