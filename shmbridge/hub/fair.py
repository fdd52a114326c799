"""Policy "fair": oldest first in an environment, token-fair over environments by weight, minimum shares.

Not thread-safe, except for the calls that schedulers.py names.

The order over environments is weighted deficit round robin, in tokens: M. Shreedhar and G. Varghese,
"Efficient Fair Queueing Using Deficit Round Robin", SIGCOMM 1995: every visit adds a quantum to a queue's
deficit counter, and the queue is served while the counter lasts.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

from shmbridge.atropos.env_status import MIN_ENV_WEIGHT, EnvWeight
from shmbridge.config import check_seconds
from shmbridge.hub.schedulers import Want
from shmbridge.record.groups import Group

_BEHIND_A_HEAD = 32  # groups of a flow tried for the rest of a batch
_MOST_FLOWS = 256  # kept while empty, for their weights
_NEVER = float("inf")
_NUMBER = attrgetter("number")


class Flow:
    """The groups of one producer, and the tokens it may spend.

    `count`, `rows`, `missed` and `passed` belong to the scheduler.
    """

    __slots__ = (
        "_head_tokens",
        "count",
        "deficit",
        "missed",
        "passed",
        "producer_id",
        "queue",
        "rows",
        "visited",
        "weight",
    )

    def __init__(self, producer_id: str, weight: float) -> None:
        self.producer_id, self.weight = producer_id, weight
        self.queue: deque[Group] = deque()  # oldest first; RoundRobin takes from it
        self._head_tokens = 0
        self.count = self.rows = 0
        self.deficit = 0.0
        self.visited = False
        self.missed = 0
        self.passed = 0  # batches without it, although it had the turn: its oldest group did not fit

    @property
    def head_tokens(self) -> int:
        """Tokens of its oldest group, at least 1."""
        if not self._head_tokens:
            self._head_tokens = max(self.queue[0].tokens, 1)
        return self._head_tokens

    def pop(self, place: int = 0) -> Group:
        """Removes and returns a group; by default the oldest."""
        if place:
            group = self.queue[place]
            del self.queue[place]
            return group
        self._head_tokens = self.passed = 0
        return self.queue.popleft()

    def pop_many(self, count: int) -> list[Group]:
        """Removes and returns the `count` oldest groups."""
        self._head_tokens = self.passed = 0
        oldest = self.queue.popleft
        return [oldest() for _ in range(count)]

    def replace(self, groups: deque[Group]) -> None:
        """Replaces the queue."""
        self.queue, self._head_tokens, self.passed = groups, 0, 0


class RoundRobin:
    """The flows that have groups, in the order of their turns.

    A turn costs O(1) while weights are comparable, and never more than a few passes over the flows: rounds
    that would serve no flow are added at once. With a single flow, deficits are not computed.
    """

    def __init__(self) -> None:
        self._waiting: deque[Flow] = deque()
        self._aside: list[Flow] = []
        self._quantum = 1  # added to the heaviest flow per visit: the largest group seen, in tokens
        self.heaviest = 1.0

    @property
    def flows(self) -> list[Flow]:
        """The flows that have groups, in the order of their turns."""
        return [*self._aside, *self._waiting]

    @property
    def only(self) -> Flow | None:
        """The flow, if there is just one."""
        return self._waiting[0] if len(self._waiting) == 1 and not self._aside else None

    @property
    def overdue(self) -> Flow | None:
        """The flow passed over most often, if more than once. Checks every flow."""
        flow = max(self._waiting, key=lambda each: each.passed, default=None)
        return flow if flow is not None and flow.passed > 1 else None

    def join(self, flow: Flow, group: Group) -> None:
        """Queues the first group of an empty flow: it starts with deficit 0, behind the others."""
        flow.deficit, flow.visited = 0.0, False
        self._waiting.append(flow)
        flow.queue.append(group)

    def turn(self) -> Flow | None:
        """Returns the flow that has the turn, of those not set aside; it may spend its oldest group."""
        waiting = self._waiting
        if len(waiting) <= 1:
            return waiting[0] if waiting else None
        while True:
            for _ in range(len(waiting)):
                flow = waiting[0]
                self._quantum = max(self._quantum, flow.head_tokens)
                if not flow.visited:
                    flow.visited = True
                    flow.deficit += self._earned(flow)
                if flow.deficit >= flow.head_tokens:
                    return flow
                flow.visited = False
                waiting.rotate(-1)
            rounds = (
                min(math.ceil((flow.head_tokens - flow.deficit) / self._earned(flow)) for flow in waiting) - 1
            )
            for flow in waiting:
                flow.deficit += max(rounds, 0) * self._earned(flow)

    def serve(self, flow: Flow, place: int = 0) -> Group:
        """Takes a group of a flow and charges its tokens; before the flow's turn this leaves it in debt."""
        if self.only is None:
            flow.deficit -= flow.queue[place].tokens if place else flow.head_tokens
        group = flow.pop(place)
        if not flow.queue:
            (self._aside if flow in self._aside else self._waiting).remove(flow)
        return group

    def serve_turns(self, count: int) -> list[Group]:
        """Takes `count` groups, each at its flow's turn; there must be that many."""
        served: list[Group] = []
        while len(served) < count and (flow := self.turn()) is not None:
            if len(self._waiting) == 1:
                served += flow.pop_many(min(count - len(served), len(flow.queue)))
            while flow.queue and len(served) < count and flow.deficit >= flow.head_tokens:
                flow.deficit -= flow.head_tokens
                served.append(flow.pop())
            if not flow.queue:
                self._waiting.popleft()
        return served

    def drain(self) -> list[Group]:
        """Removes and returns all groups of all flows, and zeroes the flows' counts."""
        groups: list[Group] = []
        for flow in self._waiting:
            groups += flow.queue
            flow.replace(deque())
            flow.count = flow.rows = 0
        self._waiting.clear()
        return groups

    def set_aside(self) -> Flow:
        """Passes over the flow that has the turn, until `restore`: it then has the next turn."""
        self._aside.append(self._waiting.popleft())
        return self._aside[-1]

    def restore(self) -> None:
        """Ends a batch: flows passed over come first in the next; debts beyond one visit are forgiven."""
        self._waiting.extendleft(reversed(self._aside))
        self._aside.clear()
        for flow in self._waiting:
            flow.deficit = max(flow.deficit, -self._earned(flow))

    def line_up(self, flows: Iterable[Flow]) -> None:
        """Repairs the order after an exception ended a call half-way: each flow with groups waits once."""
        for flow in (known := dict.fromkeys([*self.flows, *flows])):
            flow.replace(flow.queue)
        self._waiting = deque(flow for flow in known if flow.queue)
        self._aside = []

    def keep(self, flow: Flow, groups: deque[Group]) -> None:
        """Replaces a flow's groups by these, a subset of them."""
        flow.replace(groups)
        if not groups and flow in self._waiting:
            self._waiting.remove(flow)

    def _earned(self, flow: Flow) -> float:
        return self._quantum * flow.weight / self.heaviest


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
        chosen = _FairBatch(want)
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

    def _choose(self, chosen: "_FairBatch", needs: list[tuple[Flow, int]]) -> None:
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

    def _look_behind_the_head(self, chosen: "_FairBatch", flow: Flow) -> None:
        place = 1
        while chosen.left and place < min(len(flow.queue), _BEHIND_A_HEAD):
            if chosen.has_room_for(flow.queue[place]):
                chosen.append(self._round_robin.serve(flow, place))
            else:
                place += 1

    def _count_what_is_amiss(self, chosen: "_FairBatch", needs: list[tuple[Flow, int]]) -> None:
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


class _FairBatch:
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
