"""The groups that verl has rows of: their records stay leased until verl is done with them. Any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shmbridge.consumers.verl.metrics import GroupSummary
from shmbridge.record.groups import Group

__all__ = ["Folded", "FoldedGroups"]


@dataclass
class Folded:
    """One group of the bridge, under the uid it was folded onto."""

    group: Group
    keys: list[str]  # of its rows in TransferQueue
    summary: GroupSummary

    def release(self) -> None:
        """Ends the leases of its records. Never blocks."""
        for record in self.group.records:
            record.release()


class FoldedGroups:
    """Groups by uid, and counters of what was folded, left out and released. Never blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Folded] = {}
        self._counts: Counter[str] = Counter()

    def hold(self, folded: Mapping[str, Folded], counts: Mapping[str, int]) -> None:
        """Takes over groups by uid, and counts."""
        with self._lock:
            self._held.update(folded)
            self._counts.update(counts)

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[name] += number

    def release(self, uids: Iterable[str], counted_as: str) -> list[Folded]:
        """Releases the groups of these uids that are held, and returns them."""
        with self._lock:
            released = [self._held.pop(uid) for uid in list(uids) if uid in self._held]
            self._counts[counted_as] += len(released)
        for folded in released:
            folded.release()
        return released

    def uids_without_rows(self, there: Collection[str]) -> list[str]:
        """Returns the held uids of which no key is `there`: verl has cleared them."""
        with self._lock:
            held = dict(self._held)
        return [
            uid
            for uid, folded in held.items()
            if uid not in there and not any(key in there for key in folded.keys)
        ]

    def forget(self) -> None:
        """Drops all groups; releases nothing."""
        with self._lock:
            self._held.clear()

    def uids(self) -> list[str]:
        """Returns the uids of the held groups."""
        with self._lock:
            return list(self._held)

    def stats(self) -> dict[str, float]:
        """Returns the counters as `..._total`, and `groups_held`."""
        with self._lock:
            counts = {f"{name}_total": float(count) for name, count in sorted(self._counts.items())}
            return {**counts, "groups_held": float(len(self._held))}
