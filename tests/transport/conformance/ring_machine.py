"""A Hypothesis state machine that drives a ring and checks the rules of every ring after each step.

It compares with the history of its own steps, beside what the ring itself is compared with.
"""

import random
import sys
from collections.abc import Callable

from against_model import AgainstModel
from compiled_ring import CompiledRing, Seen
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmbridge.testing.model import LINE, lines

Key = tuple[int, int]  # lane and sequence

_BEFORE_TROUBLE = 3  # records of a lane before its producer may die or its words be damaged


class LaneHistory:
    """The steps made on one lane, and their expected result."""

    def __init__(self) -> None:
        self.committed: list[bytes] = []
        self.extents: dict[int, tuple[int, int]] = {}  # of un-released records
        self.claim: tuple[int, int] | None = None
        self.alive = True
        self.handed_out: set[int] = set()  # by hubs that are no more
        self.given: list[int] = []  # by the present hub
        self.discarded = 0
        self.damaged: int | None = None  # the record whose slot is nonsense
        self.quarantined = False

    @property
    def unreleased(self) -> list[int]:
        """Sequences that are committed and not released, in order."""
        return sorted(self.extents)

    @property
    def due(self) -> list[int]:
        """Those that the present hub has not given yet, in order; none of a quarantined lane."""
        return (
            []
            if self.quarantined
            else [sequence for sequence in self.unreleased if sequence not in self.given]
        )


class RingMachine(RuleBasedStateMachine):
    """Lanes small enough that slots, bytes and gaps all run out; hubs and producers that die; a peer that
    writes nonsense.
    """

    @initialize(
        lane_count=st.integers(1, 3), slots=st.sampled_from([1, 2, 4, 8]), data_lines=st.integers(4, 14)
    )
    def open(self, lane_count: int, slots: int, data_lines: int) -> None:
        """A new bridge, no hub yet."""
        self.slots, self.data_bytes = slots, data_lines * LINE
        self.ring = AgainstModel(CompiledRing(lane_count, slots, self.data_bytes))
        self.lanes = [LaneHistory() for _ in range(lane_count)]
        self.hub = False
        self.leases: set[Key] = set()
        self.views: set[Key] = set()  # of records whose lease was asked to end
        self.adrift: set[Key] = set()

    def teardown(self) -> None:
        """One more hub must get exactly what is left."""
        if not hasattr(self, "lanes"):
            return
        try:
            if sys.exception() is None:  # show the failed step, not its consequences
                self._one_more_hub()
        finally:
            self.ring.close()

    def _one_more_hub(self) -> None:
        if self.hub:
            self.hub_dies()
        self.hub_starts()
        while any(lane.due for lane in self.lanes):
            self.take()
        self.take()
        self.words_agree_with_history()

    # -- the producers
    # --------------------------------------------------------------------------------------------------------

    def _lanes_with(
        self, data: st.DataObject, true: Callable[[LaneHistory], bool]
    ) -> tuple[int, LaneHistory]:
        number = data.draw(
            st.sampled_from([number for number, lane in enumerate(self.lanes) if true(lane)]), "lane"
        )
        return number, self.lanes[number]

    @precondition(lambda self: any(_can_claim(lane) for lane in self.lanes))
    @rule(data=st.data(), size=st.integers(1, 6 * LINE))
    def claim(self, data: st.DataObject, size: int) -> None:
        """Refused only if there is no room; a granted claim is aligned, inside the data area, and overlaps no
        record.
        """
        number, lane = self._lanes_with(data, _can_claim)
        at, size_taken = self.ring.claim(number, size), lines(size)
        if at is None:
            full = len(lane.extents) == self.slots
            assert full or size_taken > _widest_gap(lane, self.data_bytes), (
                f"no room for {size} beside {lane.extents}"
            )
            return
        assert at % LINE == 0 and 0 <= at <= self.data_bytes - size_taken, (  # noqa: PT018
            f"{at}+{size_taken} is not in the data area"
        )
        assert len(lane.extents) < self.slots, "more records than slots"
        for sequence, (begin, length) in lane.extents.items():
            assert at + size_taken <= begin or begin + length <= at, (
                f"{at}+{size_taken} lies on record {sequence} at {begin}+{length}"
            )
        lane.claim = (at, size_taken)

    @precondition(lambda self: any(lane.claim for lane in self.lanes))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Sequences of a lane count from 0 without a gap."""
        number, lane = self._lanes_with(data, lambda lane: lane.claim is not None)
        assert lane.claim is not None
        payload = random.Random(f"{number}/{len(lane.committed)}").randbytes(lane.claim[1])
        sequence = self.ring.commit(number, payload)
        assert sequence == len(lane.committed), f"committed as {sequence}, not as {len(lane.committed)}"
        lane.extents[sequence], lane.claim = lane.claim, None
        lane.committed.append(payload)

    @precondition(lambda self: any(lane.claim for lane in self.lanes))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Leaves no trace."""
        number, lane = self._lanes_with(data, lambda lane: lane.claim is not None)
        self.ring.abort(number)
        lane.claim = None

    @precondition(lambda self: any(_may_end(lane) for lane in self.lanes))
    @rule(data=st.data())
    def producer_dies(self, data: st.DataObject) -> None:
        """The record being written never existed; committed records stay."""
        number, lane = self._lanes_with(data, _may_end)
        self.ring.producer_dies(number)
        lane.alive, lane.claim = False, None

    # -- the hub
    # --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.hub)
    @rule()
    def hub_starts(self) -> None:
        """Everything un-released is due again."""
        self.ring.hub_starts()
        self.hub = True

    @precondition(lambda self: self.hub)
    @rule()
    def hub_dies(self) -> None:
        """Its death releases nothing."""
        self.ring.hub_dies()
        self.hub = False
        for lane in self.lanes:
            lane.handed_out.update(lane.given)
            lane.given.clear()
        for keys in (self.leases, self.views, self.adrift):
            keys.clear()

    @precondition(lambda self: self.hub)
    @rule()
    def take(self) -> None:
        """A taken record is whole, in order per lane, once per hub, and marked exactly if an earlier hub had
        it; none comes only if none is due.
        """
        seen = self.ring.take()
        self._notice_quarantines()
        if seen is None:
            due = {number: lane.due for number, lane in enumerate(self.lanes) if lane.due}
            assert not due, f"nothing was given, due are {due}"
            return
        self._check_given(seen)
        self.lanes[seen.lane].given.append(seen.sequence)
        self.leases.add((seen.lane, seen.sequence))

    def _check_given(self, seen: Seen) -> None:
        lane = self.lanes[seen.lane]
        assert seen.sequence not in lane.given, (
            f"record {seen.sequence} of lane {seen.lane} was given twice by one hub"
        )
        assert seen.sequence in lane.extents, (
            f"record {seen.sequence} of lane {seen.lane} was released, or never committed"
        )
        assert lane.due and seen.sequence == lane.due[0], (  # noqa: PT018
            f"lane {seen.lane} gave {seen.sequence}, due are {lane.due}"
        )
        assert seen.sequence != lane.damaged, (
            f"record {seen.sequence} of lane {seen.lane} was given, its slot is nonsense"
        )
        assert seen.payload == lane.committed[seen.sequence], (
            f"record {seen.sequence} of lane {seen.lane} is not what was committed"
        )
        marked = seen.sequence in lane.handed_out
        assert seen.redelivered == marked, (
            f"record {seen.sequence} of lane {seen.lane}: redelivered={seen.redelivered}, is {marked}"
        )

    def _notice_quarantines(self) -> None:
        """A lane may be quarantined only when its damaged record is due; all due records are lost and
        counted.
        """
        for number, lane in enumerate(self.lanes):
            if self.ring.words(number).quarantined and not lane.quarantined:
                assert lane.due, f"lane {number} is quarantined, and nothing of it was due"
                assert lane.due[0] == lane.damaged, (
                    f"lane {number} is quarantined, its record {lane.due[0]} is good"
                )
                lane.discarded += len(lane.due)
                lane.quarantined = True

    def _draw(self, data: st.DataObject, keys: set[Key]) -> Key:
        return data.draw(st.sampled_from(sorted(keys)), "record")

    def _ended(self, key: Key) -> None:
        del self.lanes[key[0]].extents[key[1]]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """In any order."""
        key = self._draw(data, self.leases)
        self.leases.remove(key)
        self.ring.release(*key)
        self._ended(key)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """A release that is counted."""
        key = self._draw(data, self.leases)
        self.leases.remove(key)
        self.ring.discard(*key)
        self._ended(key)
        self.lanes[key[0]].discarded += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_under_view(self, data: st.DataObject) -> None:
        """As long as the view is there the record is held."""
        key = self._draw(data, self.leases)
        self.leases.remove(key)
        self.ring.release_under_view(*key)
        self.views.add(key)

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def drop_view(self, data: st.DataObject) -> None:
        """Now the lease ends."""
        key = self._draw(data, self.views)
        self.views.remove(key)
        self.ring.drop_view(*key)
        self._ended(key)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """This hub gives the record up, and the next one gets it."""
        key = self._draw(data, self.leases)
        self.leases.remove(key)
        self.ring.abandon(*key)
        self.adrift.add(key)

    # -- trouble, and what can be seen
    # ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.hub and any(_may_be_damaged(lane) for lane in self.lanes))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """The damage is seen when that record is due, and affects that lane only."""
        number, lane = self._lanes_with(data, _may_be_damaged)
        self.ring.damage(number)
        lane.damaged = lane.due[0]

    @invariant()
    def words_agree_with_history(self) -> None:
        """Produced = released + held + discarded, lane by lane; every word follows from the steps so far."""
        for number, lane in enumerate(getattr(self, "lanes", [])):
            words = self.ring.words(number)
            handed_out = lane.handed_out.union(lane.given)
            assert words.committed == len(lane.committed), (
                f"lane {number}: {words}, committed were {len(lane.committed)}"
            )
            assert words.head == max(handed_out, default=-1) + 1, (
                f"lane {number}: {words}, handed out were {handed_out}"
            )
            assert words.unreleased == len(lane.extents), (
                f"lane {number}: {words}, un-released are {lane.unreleased}"
            )
            assert words.discarded == lane.discarded, (
                f"lane {number}: {words}, discarded were {lane.discarded}"
            )
            assert words.quarantined == lane.quarantined, f"lane {number}: {words}"
            if self.hub:
                held = sum(key[0] == number for key in self.leases | self.views)
                assert (words.waiting, words.held) == (len(lane.due), held), (
                    f"lane {number}: {words}, due are {lane.due}, held {held}"
                )

    @invariant()
    def nobody_writes_where_somebody_reads(self) -> None:
        """Leased and viewed bytes never change."""
        for lane, sequence in getattr(self, "leases", set()) | getattr(self, "views", set()):
            assert self.ring.read(lane, sequence) == self.lanes[lane].committed[sequence], (
                f"record {sequence} of lane {lane} has changed"
            )


def _can_claim(lane: LaneHistory) -> bool:
    return lane.alive and lane.claim is None


def _may_end(lane: LaneHistory) -> bool:
    return lane.alive and len(lane.committed) >= _BEFORE_TROUBLE


def _may_be_damaged(lane: LaneHistory) -> bool:
    return lane.damaged is None and len(lane.committed) >= _BEFORE_TROUBLE and bool(lane.due)


def _widest_gap(lane: LaneHistory, data_bytes: int) -> int:
    widest, begin = 0, 0
    for at, length in [*sorted(lane.extents.values()), (data_bytes, 0)]:
        widest, begin = max(widest, at - begin), at + length
    return widest
