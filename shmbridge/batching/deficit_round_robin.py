"""Weighted deficit round robin over the queues of several producers, in tokens.

M. Shreedhar and G. Varghese, "Efficient Fair Queueing Using Deficit Round Robin", SIGCOMM 1995: every visit
adds a quantum to a queue's deficit counter, and the queue is served while the counter lasts. Used by fair.py.
"""

import math
from collections import deque
from collections.abc import Iterable

from shmbridge.record.groups import Group


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
