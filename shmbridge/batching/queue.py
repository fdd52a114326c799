"""Groups that are committed and in no batch yet, counted by producer; for status, and for programs that serve
batches to others.

Knows lanes and what forms batches. Any thread. Used by the consumer and by its control server; the gateway
reaches it as `Consumer.queue`.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shmbridge.atropos.env_status import EnvShare
from shmbridge.batching.former import BatchFormer
from shmbridge.hub.lanes import LaneSet
from shmbridge.record.groups import Group, GroupAssembler


@dataclass(frozen=True, slots=True)
class OutsideQueue:
    """What a program that takes all records at once, and queues their groups itself, says of its queue; for
    Consumer(outside=).

    Attributes:
        waiting: groups that wait there, by producer id; they count as queued for the environments of the
            control plane.
        first_env_id: the number of the first environment that the control plane registers; lower ones are the
            program's.
    """

    waiting: Counter[str] = field(default_factory=Counter)
    first_env_id: int = 0


class GroupQueue:
    """`Consumer.queue`, for programs that serve batches to others: what waits, and how many batches count as
    handed out.
    """

    def __init__(self, former: BatchFormer, lanes: LaneSet, outside: OutsideQueue) -> None:
        self._former, self._lanes, self._outside = former, lanes, outside.waiting

    def groups(self, producer_id: str | None = None) -> int:
        """Groups committed and not yet in a batch, of one producer or all; a fragment not yet read counts as
        one.

        Never blocks.
        """
        waiting = sum(lane.waiting for lane in self._lanes if producer_id in (None, lane.producer_id))
        return waiting + self._taken(producer_id)

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """Of each: whether a lane of it is attached and its process lives, and its groups; one walk of the
        lanes for all of them.
        """
        waiting, live = Counter[str](), set()
        for lane in self._lanes:
            waiting[lane.producer_id] += lane.waiting
            if not lane.dead:
                live.add(lane.producer_id)
        return {each: (each in live, waiting[each] + self._taken(each)) for each in producer_ids}

    def _taken(self, producer_id: str | None) -> int:
        """Groups that were taken from lanes and are in no batch."""
        outside = self._outside.total() if producer_id is None else self._outside[producer_id]
        return self._former.queued(producer_id) + outside

    def stats(self, shares: Mapping[str, EnvShare]) -> dict[str, float]:
        """All, and by the names of the environments that have asked for shares."""
        by_env = {
            f"queue_groups{{{shares[each].name}}}": groups
            for each, (_, groups) in self.look_at_producers(shares).items()
        }
        return {"queue_groups": self.groups(), **by_env}

    def count_batch(self, batches: int = 1) -> None:
        """So many batches were handed out that `take_groups` has not counted; below 0: were undone before
        anybody read them.
        """
        self._former.count_batch(batches)

    def take_incomplete(self, fragments: GroupAssembler) -> list[Group]:
        """Takes out what will never be whole, of fragments of all records that there are: it is late, or its
        producer has left.
        """
        late = list(fragments.late(time.monotonic(), self._lanes.busy_producers()))
        return [*late, *fragments.orphans(self._lanes.finished_producers())]
