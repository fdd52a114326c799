"""A rank's share of one batch as the rank reads it, and which of its leases are gone. Used by rank.py."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeVar

from shmbridge._ext.lane import RankReader
from shmbridge.batch import Layout
from shmbridge.record.groups import Group
from shmbridge.record.record import Record

if TYPE_CHECKING:
    from shmbridge.control.messages import Manifest

Made = TypeVar("Made")
Looks = list[tuple[RankReader, int]]  # reader, number of the look


class RankShare:
    """One rank's share of one batch: `groups` of records held in place, and the `manifest` that named them.

    A context manager, which releases the share unless it is left by an exception. The rank reports it done
    once all its records are released and no view of them is left. A share dropped without release comes again
    from next_share if it was not read; else see Rank.take_back_dropped.
    """

    def __init__(self, manifest: "Manifest", groups: list[Group]) -> None:
        self.manifest, self.groups = manifest, groups

    @property
    def records(self) -> list[Record]:
        """The records of all groups, in order."""
        return [record for group in self.groups for record in group.records]

    def hand_out(self) -> None:
        """Marks every record as looked at."""
        for record in self.records:
            record._looked_at = True

    def release(self) -> None:
        """Releases every record. Idempotent."""
        for record in self.records:
            record.release()

    def __repr__(self) -> str:
        records = self.records
        state = "; released" if records and all(record.is_released for record in records) else ""
        said = f"{len(self.groups)} groups, {len(records)} records"
        return f"<RankShare {self.manifest.number} of rank {self.manifest.rank}: {said}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()


def lost_of(held: Looks) -> list[bool | None]:
    """Returns per un-released lease None while it lives, else whether its record was looked at."""
    return [reader.lost(look) for reader, look in held if reader.holds(look)]


def is_open(held: Looks, *, of_this_hub: bool) -> bool:
    """Returns whether a lease was not released yet, or a view of its record lives.

    Records dropped from an earlier hub do not count: the present hub hands them out again.
    """
    return any(reader.holds(look) and (of_this_hub or reader.lost(look) is None) for reader, look in held)


def own_look(gather: Callable[[list[Group], Layout], Made], groups: list[Group], layout: Layout) -> Made:
    """Returns what `gather` makes of the groups.

    Its reads do not count as the user looking at the records, also when it is interrupted.
    """
    records = [record for group in groups for record in group.records]
    before = [record._looked_at for record in records]
    try:
        return gather(groups, layout)
    finally:
        for record, looked_at in zip(records, before, strict=True):
            record._looked_at = looked_at
