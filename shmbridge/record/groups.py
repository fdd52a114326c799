"""Assembles the fragments of a group, put by one producer, from records; reads only their metadata."""

import logging
from collections.abc import Iterable, Iterator

from shmbridge.record.record import Record
from shmbridge.record.unreleased import Call
from shmbridge.segments.discard_reasons import Discard

log = logging.getLogger(__name__)

NO_VERSION = 1 << 62  # later than all


class Group:
    """The records of one group, complete when their rows add up to its size. Holds their leases."""

    __slots__ = ("began_s", "chosen", "number", "records", "rows", "size", "wrong")

    def __init__(self, size: int, began_s: float) -> None:
        self.records: list[Record] = []
        self.rows = 0
        self.size = size
        self.began_s = began_s
        self.number = 0  # order in which groups became complete; set by the scheduler
        self.wrong = ""  # how its fragments contradict each other; such a group is never complete
        self.chosen = False  # for a batch whose step is not over; set by batching/in_flight.py

    def append(self, record: Record) -> None:
        """Takes over a record and its lease."""
        self.rows += record.rows
        self.records.append(record)  # the first call in here: no signal handler gets in between

    def discard(self, reason: Discard) -> None:
        """Releases its records unread and counts them as discarded."""
        for record in self.records:
            record._discard(reason)

    def abandon(self) -> None:
        """Ends all leases without release, whatever views live: the next consumer gets the group again."""
        for record in self.records:
            record._abandon()

    def __repr__(self) -> str:
        of = f" {self.group_id} of {self.producer_id}" if self.records else ""
        state = f"; {self.wrong}" if self.wrong else ""
        said = f"{self.rows}/{self.size} rows, {self.tokens if self.records else 0} tokens"
        return f"<Group{of}: {said}, {len(self.records)} records{state}>"

    @property
    def complete(self) -> bool:
        """Whether all rows are here."""
        return self.rows >= self.size and not self.wrong

    @property
    def producer_id(self) -> str:
        """Id of the producer that put it; one group comes from one producer."""
        return self.records[0]._lane.producer_id  # not from its meta, which is built on demand

    @property
    def group_id(self) -> str:
        """Its id among its producer's groups."""
        return self.records[0]._group_id

    @property
    def env_id(self) -> int | None:
        """The number under which its environment has registered; None if it has none."""
        env_id = self.records[0]._env_id
        return None if env_id < 0 else env_id

    @property
    def split(self) -> str:
        """ "train" or "eval"."""
        return self.records[0]._split  # not from its meta: looking at that counts as reading

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        records = self.records
        return records[0].token_count if len(records) == 1 else sum(record.token_count for record in records)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version under which any of its records began; -1 if none was stamped."""
        return min(record._min_policy_version for record in self.records)


class GroupAssembler:
    """Holds partial groups until they are complete or late. Not thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._partial: dict[tuple[str, str], Group] = {}

    def __len__(self) -> int:
        return len(self._partial)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._partial.values())

    def add(self, record: Record, now_s: float) -> Group | None:
        """Takes over a record; returns its group once that is complete. `now_s` is time.monotonic()."""
        if record.rows >= record._group_size:
            group = Group(record._group_size, now_s)
            group.append(record)
            return group
        key = (record._lane.source, record._group_id)
        group = self._partial.get(key) or self._partial.setdefault(key, Group(record._group_size, now_s))
        if not group.wrong and (why := _contradiction(group, record)):
            group.wrong = why
            log.error(
                "group %s of %s will be discarded: %s -> one group_size= for all fragments of a group",
                key[1],
                key[0],
                why,
            )
        group.append(record)
        return self._partial.pop(key) if group.complete else None

    def completed(self) -> Iterator[Group]:
        """Removes and yields complete groups that an exception kept `add` from returning."""
        for key in [key for key, group in self._partial.items() if group.complete]:
            yield self._partial.pop(key)

    def late(self, now_s: float, busy: set[str]) -> Iterator[Group]:
        """Removes and yields contradictory groups, and old ones unless their producer has records waiting."""
        late = [
            key
            for key, group in self._partial.items()
            if group.wrong or (now_s - group.began_s > self.timeout_s and key[0] not in busy)
        ]
        for key in late:
            yield self._partial.pop(key)

    def orphans(self, producer_ids: set[str]) -> Iterator[Group]:
        """Removes and yields the partial groups of producers that will put nothing more."""
        for key in [key for key in self._partial if key[0] in producer_ids]:
            yield self._partial.pop(key)


def hand_out(groups: Iterable[Group], call: Call, *, looked_at: bool) -> None:
    """Notes which call handed out the groups' records, and whether the records count as looked at."""
    for group in groups:
        for record in group.records:
            record._handed_out_by, record._looked_at = call, looked_at


def oldest_version(groups: Iterable[Group], known: int = NO_VERSION) -> int:
    """Returns the oldest version stamped on any group, or `known` if that is older."""
    return min([known, *(version for group in groups if (version := group.oldest_version) >= 0)])


def _contradiction(group: Group, record: Record) -> str:
    """Returns why the record cannot be a fragment of the group it names; "" if it can."""
    if record._group_size != group.size:
        return f"one fragment says group_size={group.size}, another {record._group_size}"
    if group.records and record._split != group.split:
        return f"one fragment says split={group.split!r}, another {record._split!r}"
    rows = group.rows + record.rows
    return f"its fragments have {rows} rows, and group_size={group.size}" if rows > group.size else ""
