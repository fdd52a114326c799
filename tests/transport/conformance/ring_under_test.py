"""What a ring must offer to be driven by the conformance suite: some lanes, a producer each, and at most one
hub at a time.

The words are those of docs/adr/0001-lanes.md. ModelRing and CompiledRing derive from RingUnderTest.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seen:
    """What a hub is handed: a record, and whether an earlier hub may have handed it out."""

    lane: int
    sequence: int
    payload: bytes
    redelivered: bool


@dataclass(frozen=True, slots=True)
class Words:
    """What can be read off one lane at any time. The last two are the present hub's, 0 without one."""

    committed: int  # records; the next sequence
    head: int  # every sequence below may have been handed out
    unreleased: int  # committed, and not released: what the lane still stores
    discarded: int  # released unread, or lost to a quarantine
    quarantined: bool
    waiting: int  # can be taken
    held: int  # taken, its lease not ended


class RingUnderTest(ABC):
    """One bridge. Lanes are numbered from 0; a record is known by lane and sequence.

    The suite never calls what the protocol forbids, such as a second claim of one lane. A ring may answer
    such a call as it likes.

    Args:
        lane_count: how many lanes, each with a living producer.
        slots: most committed, un-released records of a lane.
        data_bytes: size of a lane's data area, whole lines.
    """

    def __init__(self, lane_count: int, slots: int, data_bytes: int) -> None:
        self.lane_count, self.slots, self.data_bytes = lane_count, slots, data_bytes

    # -- a lane's producer
    # --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def claim(self, lane: int, size: int) -> int | None:
        """Reserves `size` bytes, rounded up to lines: their place in the data area; None while there is no
        room.
        """

    @abstractmethod
    def commit(self, lane: int, payload: bytes) -> int:
        """Fills the open claim, of exactly this many lines, and publishes it: its sequence."""

    @abstractmethod
    def abort(self, lane: int) -> None:
        """Gives the open claim back, after something was written there."""

    @abstractmethod
    def producer_dies(self, lane: int) -> None:
        """The lane's producer is no more, with or without an open claim; nobody calls it again."""

    # -- the hub
    # --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def hub_starts(self) -> None:
        """A hub comes and adopts every lane."""

    @abstractmethod
    def hub_dies(self) -> None:
        """The hub is no more: its leases and views end without release."""

    @abstractmethod
    def take(self) -> Seen | None:
        """The next record of any lane, leased; None if no lane has one.

        A lane whose words cannot be true is quarantined on the way.
        """

    @abstractmethod
    def read(self, lane: int, sequence: int) -> bytes:
        """What the memory of a leased or viewed record says now."""

    @abstractmethod
    def release(self, lane: int, sequence: int) -> None:
        """Ends a lease."""

    @abstractmethod
    def abandon(self, lane: int, sequence: int) -> None:
        """Forgets a lease without release: only the next hub gets the record."""

    @abstractmethod
    def discard(self, lane: int, sequence: int) -> None:
        """Ends a lease, and counts the record as discarded."""

    @abstractmethod
    def release_under_view(self, lane: int, sequence: int) -> None:
        """Asks for the end of a lease while a view of the record is kept: it ends with `drop_view`."""

    @abstractmethod
    def drop_view(self, lane: int, sequence: int) -> None:
        """Lets the kept view go."""

    # -- whoever looks, and whoever breaks
    # ------------------------------------------------------------------------------------------

    @abstractmethod
    def words(self, lane: int) -> Words:
        """What the lane says now."""

    @abstractmethod
    def damage(self, lane: int) -> None:
        """A buggy peer writes nonsense over the slot of the record that the lane would hand out next."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything and leaves nothing behind."""
