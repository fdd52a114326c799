"""The specification of a bridge's lanes and their hub, in plain Python: what each step may do, and its
visible result.

No memory, no locks, no waiting: only the rules of docs/adr/0001-lanes.md. Where a ring has a choice (the
place of an extent, the lane it serves next) the model is given the choice and checks that it was allowed.
"""

from dataclasses import dataclass
from enum import Enum, auto

LINE = 64  # the size and place of an extent are multiples of a line


def lines(size: int) -> int:
    """Returns `size` rounded up to whole lines, in bytes."""
    return -(-size // LINE) * LINE


class State(Enum):
    """State of a committed, un-released record, as the present hub knows it."""

    WAITING = auto()  # can be taken
    HELD = auto()  # leased out
    ADRIFT = auto()  # its lease was abandoned: only the next hub gets it


@dataclass(frozen=True, slots=True)
class Taken:
    """A record as the consumer sees it."""

    sequence: int
    payload: bytes
    redelivered: bool


@dataclass(slots=True)
class _Record:
    at: int
    size: int
    payload: bytes
    state: State = State.WAITING
    damaged: bool = False


class RingModel:
    """One lane of `slots` records and `data_bytes` bytes, its producer, and at most one hub at a time.

    Methods raise AssertionError if their caller breaks the protocol, for example with a second open claim.
    """

    def __init__(self, slots: int, data_bytes: int) -> None:
        self.slots, self.data_bytes = slots, data_bytes
        self.tail = 0  # records committed; the next sequence
        self.head = 0  # every sequence below may have been handed out
        self.released = 0
        self.discarded = 0
        self.quarantined = False
        self._records: dict[int, _Record] = {}  # committed and un-released, by sequence
        self._claim: tuple[int, int] | None = None  # place and size of the open claim
        self._alive = True
        self._has_hub = False
        self._head_found = 0  # `head` when the present hub came

    # -- the producer
    # --------------------------------------------------------------------------------------------------------

    def place_for(self, size: int) -> int | None:
        """Returns the first place for a claim of `size` bytes: a free slot, and a gap that is wide enough. If
        there is one, the claim must succeed.
        """
        taken = sorted(
            [(record.at, record.size) for record in self._records.values()]
            + ([self._claim] if self._claim else [])
        )
        if len(taken) == self.slots:
            return None
        begin = 0
        for at, length in [*taken, (self.data_bytes, 0)]:
            if at - begin >= lines(size):
                return begin
            begin = at + length
        return None

    def claim(self, at: int, size: int) -> None:
        """Records that the ring reserved `size` bytes at `at`.

        No un-released record may lie there: a reader may still read it.
        """
        assert self._alive, "the producer is dead"
        assert self._claim is None, "one open claim per producer"
        size = lines(size)
        assert at % LINE == 0, f"extent {at} is not on a line"
        assert 0 <= at <= self.data_bytes - size, f"extent {at}+{size} is outside {self.data_bytes} bytes"
        assert len(self._records) < self.slots, "no slot is free"
        for sequence, record in self._records.items():
            apart = at + size <= record.at or record.at + record.size <= at
            assert apart, (
                f"extent {at}+{size} overlaps un-released record {sequence} at {record.at}+{record.size}"
            )
        self._claim = (at, size)

    def abort(self) -> None:
        """Gives the open claim back; no reader ever sees it."""
        assert self._claim is not None, "nothing is claimed"
        self._claim = None

    def commit(self, payload: bytes) -> int:
        """Publishes the open claim: from here on it is never lost. Returns its sequence."""
        assert self._claim is not None, "nothing is claimed"
        self._records[self.tail] = _Record(*self._claim, payload)
        self._claim = None
        self.tail += 1
        return self.tail - 1

    def producer_dies(self) -> None:
        """Drops the open claim; committed records stay."""
        self._claim, self._alive = None, False

    # -- the hub
    # --------------------------------------------------------------------------------------------------------

    def hub_starts(self) -> None:
        """Starts a hub: every committed, un-released record can be taken again, in order."""
        assert not self._has_hub, "one hub at a time"
        self._has_hub = True
        self._head_found = self.head
        for record in self._records.values():
            record.state = State.WAITING

    def hub_dies(self) -> None:
        """Ends the hub: its leases end without release; nothing is lost."""
        self._has_hub = False

    def take(self) -> Taken | None:
        """Returns the oldest record that can be taken, or None.

        `redelivered` exactly if an earlier hub may have handed it out.

        If its slot is corrupt the lane is quarantined: nothing more is taken from it, and all waiting records
        are counted as discarded.
        """
        assert self._has_hub
        if not self.waiting:
            return None
        sequence = min(
            sequence for sequence, record in self._records.items() if record.state is State.WAITING
        )
        record = self._records[sequence]
        if record.damaged:
            self.discarded += self.waiting
            self.quarantined = True
            return None
        record.state = State.HELD
        self.head = max(self.head, sequence + 1)
        return Taken(sequence, record.payload, sequence < self._head_found)

    def release(self, sequence: int) -> None:
        """Ends a lease: slot and extent may be used again. In any order."""
        assert self._records[sequence].state is State.HELD
        del self._records[sequence]
        self.released += 1

    def discard(self, sequence: int) -> None:
        """Ends a lease, and counts the record as discarded."""
        self.release(sequence)
        self.discarded += 1

    def abandon(self, sequence: int) -> None:
        """Drops a lease without release: the next hub gets the record again."""
        assert self._records[sequence].state is State.HELD
        self._records[sequence].state = State.ADRIFT

    def damage(self) -> None:
        """Overwrites the slot of the record that would be taken next with garbage."""
        waiting = [sequence for sequence, record in self._records.items() if record.state is State.WAITING]
        self._records[min(waiting)].damaged = True

    # -- what can be seen
    # --------------------------------------------------------------------------------------------------------

    @property
    def unreleased(self) -> int:
        """Committed, un-released records, which the lane holds. Always `tail - released`."""
        assert len(self._records) == self.tail - self.released
        return len(self._records)

    @property
    def waiting(self) -> int:
        """Records that the present hub can take; none of a quarantined lane."""
        return 0 if self.quarantined or not self._has_hub else self._count(State.WAITING)

    @property
    def held(self) -> int:
        """Records that the present hub has leased out."""
        return self._count(State.HELD) if self._has_hub else 0

    def _count(self, state: State) -> int:
        return sum(record.state is state for record in self._records.values())
