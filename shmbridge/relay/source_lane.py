"""The leases of one lane of a source, and which of its groups are too stale to be sent: whole groups only."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shmbridge import Record
from shmbridge.errors import Discard
from shmbridge.hub import is_stale
from shmbridge.relay.wire import SourceLane

_MOST_PARTIAL = 256  # groups of a lane that are remembered although nothing of them is held
_PARTIAL_S = 600.0  # as long as a hub waits for the rest of a group


@dataclass(slots=True, eq=False)
class _Group:
    """A group in more than one record: it is relayed whole, once any of it was sent, or discarded whole."""

    rows: int = 0
    held: int = 0
    relayed: bool = False
    discarded: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """A lease, and its group if that has other records, too."""

    record: Record
    group: _Group | None

    @property
    def sequence(self) -> int:
        """Of the record in its lane."""
        return self.record._sequence

    def end(self) -> Record:
        """Counts the lease as ended; returns the record."""
        if self.group is not None:
            self.group.held -= 1
        return self.record


class HeldLane:
    """The leases of one lane, in the order of their sequences: those to be sent, and those that were.

    Args:
        facts: what its records share.
        first: sequence of the first that came. Records before it were released by an earlier relay: the
            beginning of a group may be among them.
    """

    def __init__(self, facts: SourceLane, first: int) -> None:
        self.facts = facts
        self.unsent: deque[Held] = deque()
        self.sent: deque[Held] = deque()
        self._partial: dict[str, _Group] = {}  # groups whose last record has not come, by id
        self._unknown_until_s = time.monotonic() + _PARTIAL_S if first > 0 else 0.0

    @property
    def held(self) -> int:
        """How many leases there are."""
        return len(self.unsent) + len(self.sent)

    def add(self, record: Record) -> Held:
        """Takes over the next lease."""
        held = Held(record, self._group_of(record))
        self.unsent.append(held)
        return held

    def next(self) -> Record:
        """Returns the next record to be sent, which is sent by that."""
        held = self.unsent.popleft()
        if held.group is not None:
            held.group.relayed = True
        self.sent.append(held)
        return held.record

    def send_again(self) -> int:
        """Begins with the first that is not acknowledged; returns how many are sent again."""
        again = len(self.sent)
        self.unsent.extendleft(reversed(self.sent))
        self.sent.clear()
        return again

    def committed(self, newest: int) -> int:
        """Releases what the other side has; returns how many."""
        before = self.held
        for queue in (self.sent, self.unsent):
            while queue and queue[0].sequence <= newest:
                held = queue.popleft()
                if held.group is not None:
                    held.group.relayed = True
                held.end().release()
        return before - self.held

    def refuse(self, sequence: int) -> bool:
        """Releases one record that the other side will not take; returns whether it was held."""
        for queue in (self.sent, self.unsent):
            for at, held in enumerate(queue):
                if held.sequence == sequence:
                    del queue[at]
                    held.end().release()
                    return True
        return False

    def discard_stale(
        self, version: int, max_staleness: int | None, among: Iterable[Held] | None = None
    ) -> int:
        """Discards what is too stale to be sent, if it is `among` these; returns how many.

        A group goes whole: if one of its records is too stale, and none was sent, all are discarded, also
        those that come later.
        """
        if max_staleness is None:
            return 0
        alone: set[int] = set()
        some = False
        for held in self.unsent if among is None else among:
            group = held.group
            if (group is None or not group.relayed) and (
                is_stale(held.record._min_policy_version, version, max_staleness)
                or (group is not None and group.discarded)
            ):
                some = True
                if group is None:
                    alone.add(held.sequence)
                else:
                    group.discarded = True
        if not some:
            return 0
        kept: deque[Held] = deque()
        before = len(self.unsent)
        for held in self.unsent:
            if held.sequence in alone or (held.group is not None and held.group.discarded):
                held.end()._discard(Discard.STALE)
            else:
                kept.append(held)
        self.unsent = kept
        return before - len(kept)

    def _group_of(self, record: Record) -> _Group | None:
        """Returns the record's group; None if the record is all of it."""
        if record.rows >= record._group_size:
            return None
        group = self._partial.get(record._group_id)
        if group is None:
            self._forget_old()
            group = self._partial[record._group_id] = _Group(relayed=time.monotonic() < self._unknown_until_s)
        group.rows += record.rows
        group.held += 1
        if group.rows >= record._group_size:
            del self._partial[record._group_id]
        return group

    def _forget_old(self) -> None:
        """Forgets the oldest groups of which nothing is held: of a producer that never completes them."""
        excess = len(self._partial) - _MOST_PARTIAL
        for group_id in [each for each, group in self._partial.items() if not group.held][: max(excess, 0)]:
            del self._partial[group_id]
