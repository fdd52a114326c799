"""The one reader of a bridge in a process, shared by all `ShmEnvManager`s of an environment worker.

It is the hub: it takes whole groups, publishes the pipeline's step as the policy version, and releases a
group once no step of ROLL can train it any more. Knows neither ROLL nor Ray.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from shmbridge import BadArgument, Batch, Consumer, Run
from shmbridge.record.groups import Group

log = logging.getLogger(__name__)

# How long one thread waits for a batch before it looks whether it should stop: longer than the second after
# which the consumer says that a batch does not fit into the lanes.
_LOOK_S = 1.5


class BridgeDrained(RuntimeError):
    """The bridge is drained, and has no whole step of groups left."""


@dataclass(frozen=True)
class Taken:
    """A group that was handed to an environment manager; its leases last until `BridgeReader` ends them."""

    group: Group
    batch: Batch
    step: int | None  # of the pipeline, whose weights began it; None: nobody stamped it


class BridgeReader:
    """Takes groups of one bridge for any number of threads. Made by `join`, ended by the last `leave`.

    Args:
        bridge: its name.
        groups_per_step: groups that are taken together, one batch of the consumer.
        lag: steps that may lie between taking a group and training it: `async_generation_ratio`.
        max_staleness: groups begun more steps ago are discarded and counted when they are taken.
        run: announced to the environments.

    Attributes:
        counts: groups put to ROLL, released, refused by ROLL, and taken again after a kill.
    """

    _open: ClassVar[dict[str, BridgeReader]] = {}
    _opening = threading.Lock()

    def __init__(self, bridge: str, groups_per_step: int, lag: int, max_staleness: int, run: Run) -> None:
        self.bridge, self._groups_per_step, self._lag = bridge, groups_per_step, lag
        self._max_staleness = max_staleness
        self.counts: Counter[str] = Counter()
        self._consumer = Consumer(bridge, run)
        self._taking = threading.Lock()  # around what takes from the consumer, for up to _LOOK_S
        self._lock = threading.Lock()  # around what is held, and the step; never for long
        self._ready: deque[Group] = deque()
        self._held: list[tuple[int, Taken]] = []  # the step in which it was put, and the group
        self._users = 0
        self._step: int | None = None
        self._first_version = 0  # the version of step 0

    @classmethod
    def join(cls, bridge: str, groups_per_step: int, lag: int, max_staleness: int, run: Run) -> BridgeReader:
        """Returns the process's reader of a bridge. Blocks while the first one adopts the lanes.

        Raises:
            BadArgument: it is open with other numbers.
            ConsumerTaken: another process reads the bridge; the message names its pid.
        """
        with cls._opening:
            there = cls._open.get(bridge)
            if there is None:
                there = cls._open[bridge] = cls(bridge, groups_per_step, lag, max_staleness, run)
            wanted = (groups_per_step, lag, max_staleness)
            if (have := (there._groups_per_step, there._lag, there._max_staleness)) != wanted:
                raise BadArgument(
                    f"bridge {bridge!r} is read with groups per step, lag and max_staleness {have}, and "
                    f"asked for with {wanted}",
                    hint="give each tag a bridge of its own",
                )
            there._users += 1
            return there

    def leave(self, *, orderly: bool) -> None:
        """Ends one user's part; the last one closes the consumer. Once per `join`; blocks for a moment.

        Args:
            orderly: the pipeline ended: what the last steps trained is released. Otherwise nothing is, and
                the next consumer gets it again.
        """
        with self._opening, self._taking, self._lock:
            self._users -= 1
            if self._users:
                return
            del self._open[self.bridge]
            if orderly and self._step is not None:
                self._release_before(self._step + 1)
            self._ready.clear()
            self._held.clear()
            self._consumer.close()

    def begin_step(self, step: int) -> None:
        """Publishes the step's policy version, and releases what no step from here on trains. Any thread.

        Never blocks for records; again for the same step does nothing.
        """
        with self._lock:
            if self._step is not None and step <= self._step:
                return
            if self._step is None and self._consumer.policy_version > step:
                self._first_version = self._consumer.policy_version - step
                log.warning(
                    "bridge %r is at policy version %d, the pipeline at step %d: its step 0 is version %d",
                    self.bridge,
                    self._consumer.policy_version,
                    step,
                    self._first_version,
                )
            self._step = step
            self._consumer.publish_policy_version(self._first_version + step)
            self._release_before(step)

    def _release_before(self, step: int) -> None:
        """Releases the groups whose last possible step is before this one."""
        over = [taken for put, taken in self._held if put + self._lag < step]
        self._held = [(put, taken) for put, taken in self._held if put + self._lag >= step]
        for taken in over:
            self._release(taken)
        self.counts["groups_released"] += len(over)

    def _release(self, taken: Taken) -> None:
        for record in taken.group.records:
            record.release()

    def take(self, stopped: Callable[[], bool]) -> Taken | None:
        """Returns the next group, leased; None once `stopped()`. Blocks until then; any thread.

        Raises:
            Closed: the reader was closed.
            BridgeDrained: no whole step of groups will come any more.
            BatchTooBig: a step of groups does not fit into the lanes.
        """
        with self._consumer.one_wait():
            while not stopped():
                with self._taking:
                    if not self._ready and not stopped():
                        self._fill()
                    if self._ready:
                        return self._hand_out(self._ready.popleft())
        return None

    def _fill(self) -> None:
        groups = self._consumer.take_groups(
            groups=self._groups_per_step, max_staleness=self._max_staleness, timeout_s=_LOOK_S
        )
        self._ready.extend(groups or ())
        if groups is None and self._consumer.draining:
            left = self._consumer.queue.groups()
            if left < self._groups_per_step:
                raise BridgeDrained(
                    f"bridge {self.bridge!r} is drained, and has {left} of the {self._groups_per_step} "
                    "groups of a step -> end training, or start a run on another bridge"
                )

    def _hand_out(self, group: Group) -> Taken:
        oldest = group.oldest_version
        batch = Batch([group], "packed")
        self.counts["groups_redelivered"] += any(record.meta.redelivered for record in group.records)
        return Taken(group, batch, oldest - self._first_version if oldest >= 0 else None)

    def put(self, taken: Taken) -> None:
        """Notes that ROLL gets the group now: it is held until its last possible step. Never blocks."""
        with self._lock:
            self._held.append((self._step or 0, taken))
            self.counts["groups_put"] += 1

    def take_back(self, taken: Taken, why: str) -> None:
        """Releases a group that ROLL did not take after all, counted as `groups_<why>`. Never blocks."""
        with self._lock:
            self._held = [(step, each) for step, each in self._held if each is not taken]
            self._release(taken)
            self.counts["groups_put"] -= 1
            self.counts[f"groups_{why}"] += 1

    def stats(self) -> dict[str, float]:
        """Returns the consumer's counters and this reader's. Any thread; never blocks."""
        return {**self._consumer.stats(), **self.counts.copy()}
