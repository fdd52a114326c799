"""Policy "fair": oldest first in an environment, token-fair over environments by weight, minimum shares.

Not thread-safe, except for the calls that scheduler.py names.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from shmbridge.atropos.env_status import MIN_ENV_WEIGHT, EnvWeight
from shmbridge.batching.batch_size import Want
from shmbridge.batching.deficit_round_robin import Flow, RoundRobin
from shmbridge.config import check_seconds
from shmbridge.record.groups import Group

_BEHIND_A_HEAD = 32  # groups of a flow tried for the rest of a batch
_MOST_FLOWS = 256  # kept while empty, for their weights
_NEVER = float("inf")
_NUMBER = attrgetter("number")


class FairScheduler:
    """A queue per producer.

    `shares` returns the shares requested by environments; a producer without one has weight 1.
    """

    formed: int | None = None

    def __init__(
        self,
        shares: Callable[[], Mapping[str, EnvWeight]],
        is_live: Callable[[str], bool],
        allocation_wait_s: float,
    ) -> None:
        check_seconds("allocation_wait_s", allocation_wait_s)
        self._shares, self._is_live, self._allocation_wait_s = shares, is_live, allocation_wait_s
        self._applied: Mapping[str, EnvWeight] | None = None
        self._allocated: list[tuple[Flow, float]] = []
        self._flows: dict[str, Flow] = {}
        self._round_robin = RoundRobin()
        self._returned: deque[Group] = deque()
        self._count = self._rows = self._next = 0
        self._formable_since_s = _NEVER
        self.waits_until_s = _NEVER
        self._missed = self._short = self._over = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Group]:
        yield from self._returned
        for flow in self._round_robin.flows:
            yield from flow.queue

    def queued(self, producer_id: str) -> int:
        """See Scheduler."""
        flow = self._flows.get(producer_id)
        return flow.count if flow else 0

    def stats(self) -> dict[str, float]:
        """See Scheduler."""
        return {
            "allocations_missed_total": self._missed,
            "batches_short_total": self._short,
            "batches_over_total": self._over,
        }

    def look_ahead(self, lanes: int) -> bool:
        """Returns whether an environment has requested a share: only then must all lanes be read first."""
        return lanes > 1 and len(self._shares()) > 0

    # -- coming in

    def add(self, group: Group) -> None:
        """See Scheduler; O(1)."""
        group.number = self._next
        self._next += 1
        producer_id = group.producer_id
        flow = self._flows.get(producer_id) or self._flow(producer_id)
        if flow.queue:
            flow.queue.append(group)
        else:
            self._round_robin.join(flow, group)
        self._count_in(flow, group)

    def put_back(self, groups: list[Group]) -> None:
        """See Scheduler."""
        self._returned.extendleft(reversed(groups))
        for group in groups:
            self._count_in(self._flow(group.producer_id), group)

    def _count_in(self, flow: Flow, group: Group, by: int = 1) -> None:
        rows = by * group.rows
        flow.count += by
        flow.rows += rows
        self._count += by
        self._rows += rows

    def _flow(self, producer_id: str) -> Flow:
        flow = self._flows.get(producer_id)
        if flow is None:
            if len(self._flows) >= _MOST_FLOWS:
                known = self._applied or {}
                self._flows = {
                    name: each for name, each in self._flows.items() if each.count or name in known
                }
            flow = self._flows[producer_id] = Flow(producer_id, 1.0)
            self._round_robin.heaviest = max(self._round_robin.heaviest, 1.0)
        return flow

    def recount(self) -> None:
        """See Scheduler."""
        self._applied = None  # so that the shares are applied again
        self._round_robin.line_up(self._flows.values())
        self._count = self._rows = 0
        for flow in self._flows.values():
            flow.count = flow.rows = 0
            for group in flow.queue:
                self._count_in(flow, group)
        for group in self._returned:
            self._count_in(self._flow(group.producer_id), group)

    def remove(self, unfit: Callable[[Group], bool]) -> list[Group]:
        """See Scheduler."""
        removed = [group for group in self if unfit(group)]
        if removed:
            gone = set(map(id, removed))
            self._returned = deque(group for group in self._returned if id(group) not in gone)
            for flow in self._round_robin.flows:
                self._round_robin.keep(flow, deque(group for group in flow.queue if id(group) not in gone))
            for group in removed:
                self._count_in(self._flow(group.producer_id), group, -1)
        return removed

    # -- choosing

    def take(self, want: Want, now_s: float, *, last: bool) -> list[Group] | None:
        """See Scheduler. O(1) per group chosen, and O(environments) per batch."""
        enough = (self._rows if want.by_rows else self._count) >= want.size or (
            last and want.by_rows and self._count > 0
        )
        self._apply_shares()
        needs = self._needs(want)
        if not enough or (needs and not last and self._waits(needs, want, now_s)):
            if not enough:
                self._formable_since_s = self.waits_until_s = _NEVER
            return None
        self._formable_since_s = self.waits_until_s = _NEVER
        if want.groups == self._count and not needs:
            return self._all_there_is()
        if not (needs or want.by_rows or self._returned):
            only = self._round_robin.only
            return self._counted_out(self._round_robin.serve_turns(want.size), only)
        chosen = _Chosen(want)
        self._choose(chosen, needs)
        self._count_what_is_amiss(chosen, needs)
        return self._counted_out(chosen.groups)

    def _all_there_is(self) -> list[Group]:
        groups = [*self._returned, *self._round_robin.drain()]
        for group in self._returned:
            flow = self._flows[group.producer_id]
            flow.count = flow.rows = 0
        self._returned.clear()
        self._count = self._rows = 0
        groups.sort(key=_NUMBER)
        return groups

    def _counted_out(self, groups: list[Group], only: Flow | None = None) -> list[Group]:
        """Sorts chosen groups oldest first and stops counting them; `only`: all are of that flow."""
        rows = sum([group.rows for group in groups])
        self._count -= len(groups)
        self._rows -= rows
        if only is not None:
            only.count, only.rows = only.count - len(groups), only.rows - rows
            return groups
        for group in groups:
            flow = self._flows[group.producer_id]
            flow.count -= 1
            flow.rows -= group.rows
        groups.sort(key=_NUMBER)
        return groups

    def _choose(self, chosen: "_Chosen", needs: list[tuple[Flow, int]]) -> None:
        while self._returned and chosen.has_room_for(self._returned[0]):
            chosen.append(self._returned.popleft())
        round_robin = self._round_robin
        if (overdue := round_robin.overdue) is not None and chosen.has_room_for(overdue.queue[0]):
            chosen.append(round_robin.serve(overdue))  # next to guaranteed shares it may never fit
        for flow, need in sorted(needs, key=lambda each: -each[0].missed):
            while (
                flow.queue and chosen.of(flow) < need and chosen.left and chosen.has_room_for(flow.queue[0])
            ):
                chosen.append(round_robin.serve(flow))
        aside: list[Flow] = []
        while (chosen.left or (needs and not aside)) and (turn := round_robin.turn()) is not None:
            if chosen.left and chosen.has_room_for(turn.queue[0]):
                chosen.append(round_robin.serve(turn))
            else:
                turn.passed += not chosen.of(turn)
                aside.append(round_robin.set_aside())
        for flow in aside:
            self._look_behind_the_head(chosen, flow)
        round_robin.restore()

    def _look_behind_the_head(self, chosen: "_Chosen", flow: Flow) -> None:
        place = 1
        while chosen.left and place < min(len(flow.queue), _BEHIND_A_HEAD):
            if chosen.has_room_for(flow.queue[place]):
                chosen.append(self._round_robin.serve(flow, place))
            else:
                place += 1

    def _count_what_is_amiss(self, chosen: "_Chosen", needs: list[tuple[Flow, int]]) -> None:
        self._short += chosen.left > 0
        self._over += chosen.left < 0
        for flow, need in needs:
            short = chosen.of(flow) < need
            flow.missed = flow.missed + 1 if short else 0
            self._missed += short and self._is_live(flow.producer_id)

    # -- guaranteed shares

    def _apply_shares(self) -> None:
        shares = self._shares()
        if shares is self._applied:
            return
        self._applied = shares
        for producer_id, share in shares.items():
            self._flow(producer_id).weight = max(share.weight, MIN_ENV_WEIGHT)
        self._round_robin.heaviest = max((flow.weight for flow in self._flows.values()), default=1.0)
        total = max(1.0, sum(share.min_allocation or 0.0 for share in shares.values()))
        self._allocated = [
            (self._flows[producer_id], share.min_allocation / total)
            for producer_id, share in shares.items()
            if share.min_allocation
        ]

    def _needs(self, want: Want) -> list[tuple[Flow, int]]:
        needs = [(flow, int(part * want.size)) for flow, part in self._allocated]
        return [(flow, need) for flow, need in needs if need]

    def _waits(self, needs: list[tuple[Flow, int]], want: Want, now_s: float) -> bool:
        """Returns whether the batch waits for the guaranteed share of a living producer."""
        if all(
            (flow.rows if want.by_rows else flow.count) >= need or not self._is_live(flow.producer_id)
            for flow, need in needs
        ):
            return False
        self._formable_since_s = min(self._formable_since_s, now_s)
        self.waits_until_s = self._formable_since_s + self._allocation_wait_s
        return now_s < self.waits_until_s


class _Chosen:
    """A batch being formed; `left` is the room left, below 0 if its only group is too large."""

    __slots__ = ("_by_producer", "_by_rows", "groups", "left")

    def __init__(self, want: Want) -> None:
        self.groups: list[Group] = []
        self.left, self._by_rows = want.size, want.by_rows
        self._by_producer: Counter[str] = Counter()

    def has_room_for(self, group: Group) -> bool:
        """Returns whether the group fits; the first of a batch always does."""
        return not self.groups or self.left >= (group.rows if self._by_rows else 1)

    def append(self, group: Group) -> None:
        """Adds a group to the batch."""
        size = group.rows if self._by_rows else 1
        self.groups.append(group)
        self.left -= size
        self._by_producer[group.producer_id] += size

    def of(self, flow: Flow) -> int:
        """Returns how much is chosen of one flow, in the batch's unit."""
        return self._by_producer[flow.producer_id]
