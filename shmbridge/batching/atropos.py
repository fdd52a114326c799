"""Policy "atropos" for a consumer's groups: upstream's queue (atropos/queue.py), filled from lanes.

Not thread-safe, except `by_env` and the calls that scheduler.py names.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from shmbridge.atropos.env_status import EnvWeight, Queued
from shmbridge.atropos.queue import AtroposQueue
from shmbridge.batching.batch_size import Want
from shmbridge.record.groups import Group


class AtroposScheduler:
    """The scheduler of policy "atropos". A wanted size counts rows: the run's batch size."""

    waits_until_s = float("inf")

    def __init__(self, shares: Callable[[], Mapping[str, EnvWeight]]) -> None:
        self._shares = shares
        self._applied: dict[int, EnvWeight] = {}
        self._seen: Mapping[str, EnvWeight] | None = None
        self._queue: AtroposQueue[Group] = AtroposQueue(0)
        self._by_producer: Counter[str] = Counter()  # groups neither in a formed batch nor buffered
        self._by_env: dict[int | None, Queued] = {}

    @property
    def formed(self) -> int | None:
        """See Scheduler."""
        return self._queue.step

    def __len__(self) -> int:
        return self._queue.queue_size

    def __iter__(self) -> Iterator[Group]:
        return iter(self._queue)

    def recount(self) -> None:
        """See Scheduler."""
        self._queue.recount()
        self._seen = None  # so that the shares are applied again
        self._recount()
        self._by_env = self._queue.by_env()

    def queued(self, producer_id: str) -> int:
        """See Scheduler."""
        return self._by_producer[producer_id]

    def by_env(self) -> Mapping[int | None, Queued]:
        """Returns the queue of each environment, as of the last change. Any thread."""
        return self._by_env

    def stats(self) -> dict[str, float]:
        """See Scheduler."""
        return {"groups_buffered": self._queue.buffered}

    def look_ahead(self, lanes: int) -> bool:
        """Returns True: upstream queues every group that was sent."""
        return True

    def add(self, group: Group) -> None:
        """See Scheduler."""
        self._apply_shares()
        for queued in self._queue.add(group, group.rows, group.env_id).queued:
            self._by_producer[queued.producer_id] += 1

    def put_back(self, groups: list[Group]) -> None:
        """See Scheduler: a whole batch comes next; groups of a partial batch go before all others."""
        known = self._queue.queue_size
        self._queue.put_back([(group, group.rows, group.env_id) for group in groups])
        if self._queue.queue_size > known:
            self._by_producer.update(group.producer_id for group in groups)
            self._by_env = self._queue.by_env()

    def take(self, want: Want, now_s: float, *, last: bool) -> list[Group] | None:
        """See Scheduler; upstream has no shorter last batch."""
        self._apply_shares()
        self._queue.batch_size = want.size
        self._by_producer.subtract(group.producer_id for group in self._queue.form())
        self._by_env = self._queue.by_env()
        return self._queue.next_batch()

    def remove(self, unfit: Callable[[Group], bool]) -> list[Group]:
        """See Scheduler."""
        removed = self._queue.remove(unfit)
        if removed:
            self._recount()
        return removed

    def _recount(self) -> None:
        self._by_producer = Counter(group.producer_id for group in self._queue.queued())

    def _apply_shares(self) -> None:
        shares = self._shares()
        if shares is self._seen:
            return
        self._seen = shares
        asked = {share.env_id: share for share in shares.values()}
        for env_id, share in asked.items():
            if self._applied.get(env_id) != share:
                self._queue.register(share)
        for env_id in self._applied.keys() - asked.keys():
            self._queue.disconnect(env_id)
        self._applied = asked
