"""The one feed of a bridge in a process, shared by all `ShmEnvManager`s of an environment worker.

It maps the pipeline's steps to policy versions, and ends a group once ROLL has trained it: as
`ShmAgenticPipeline` tells, else once no step of ROLL can train it any more. Knows neither ROLL nor Ray.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from shmbridge import BadArgument, ConsumerEmpty
from shmbridge.consumers.feed import Feed, Step
from shmbridge.weights import WeightsReader

log = logging.getLogger(__name__)

# How long one thread waits before it looks whether it should stop: longer than the feed waits before it asks
# the consumer whether a step fits into the lanes.
_LOOK_S = 3.0


class BridgeReader:
    """A feed for any number of threads. Made by `join`, ended by the last `leave`.

    Args:
        bridge: its name.
        lag: steps that may lie between taking a group and training it: `async_generation_ratio`.
        word: of `ShmAgenticPipeline` before its first step: `states`, by bridge, of the loaded checkpoint;
            None: another pipeline runs.
        options: of the Feed.

    Attributes:
        feed: where groups come from.
    """

    _open: ClassVar[dict[str, BridgeReader]] = {}
    _opening = threading.Lock()

    def __init__(
        self, bridge: str, lag: int, word: Mapping[str, Any] | None, options: dict[str, Any]
    ) -> None:
        self._lag, self._told, self._options = lag, word is not None, {"lag": lag, **options}
        if word is None and options.get("release_at") == "checkpoint":
            raise BadArgument(
                'env_config.release_at is "checkpoint", and nothing tells an environment when one is saved',
                hint="pipeline_cls: shmbridge.consumers.roll.pipeline.ShmAgenticPipeline",
            )
        self.feed = Feed(bridge, exact=True, **options | ({} if self._told else {"release_at": "step"}))
        if word is not None and bridge in (states := word.get("states", {})):
            self.feed.load_state_dict(states[bridge])
        self._lock = threading.Lock()  # around what is held, and the step; never for long
        self._held: dict[str, tuple[int, Step]] = {}  # by name: the step in which it was put, and the group
        self._users = 0
        self._step: int | None = None
        self._first_version = 0  # the version of step 0

    @classmethod
    def join(
        cls, bridge: str, lag: int, word: Mapping[str, Any] | None = None, **options: Any
    ) -> BridgeReader:
        """Returns the process's reader of a bridge. Blocks while the first one adopts the lanes.

        Raises:
            BadArgument: it is open with other numbers, or `release_at` is not possible.
            ConsumerTaken: another process reads the bridge; the message names its pid.
        """
        with cls._opening:
            if bridge not in cls._open:
                cls._open[bridge] = cls(bridge, lag, word, options)
            there, wanted = cls._open[bridge], {"lag": lag, **options}
            if other := [key for key, value in wanted.items() if value != there._options.get(key)]:
                have, want = ({key: of.get(key) for key in other} for of in (there._options, wanted))
                raise BadArgument(
                    f"bridge {bridge!r} is read with {have}, and asked for with {want}",
                    hint="give each tag a bridge of its own",
                )
            there._users += 1
            return there

    def leave(self, *, orderly: bool) -> None:
        """Ends one user's part; the last one closes the feed. Once per `join`; blocks for a moment.

        Args:
            orderly: the pipeline ended: what the last steps trained is released. Otherwise nothing is, and
                the next consumer gets it again.
        """
        with self._opening:
            self._users -= 1
            if self._users:
                return
            del self._open[self.feed.consumer.bridge]
            if orderly and self._step is not None and not self._told:
                self._end_before(self._step + 1)
            broken = None if orderly else SystemExit()  # no failure of a step
            self.feed.__exit__(None, broken, None)

    def begin_step(self, step: int) -> None:
        """Publishes the step's policy version, and ends what no step from here on trains. Any thread.

        Never blocks for records; again for the same step does nothing. Raises BridgeAhead as Feed.begin_run.
        """
        with self._lock:
            if self._step is not None and step <= self._step:
                return
            first, self._step = self._step is None, step
            if first:
                self._begin(step)
        if not first:
            self._end_before(step)

    def _begin(self, step: int) -> None:
        known, bridge = self.feed.consumer.policy_version, self.feed.consumer.bridge
        with WeightsReader(bridge) as reader:
            weights = reader.version
        # above what is published: the actor has written the weights of this step
        version = max(step, known) if weights is None or weights <= known else weights
        self._first_version = version - step
        if self._first_version:
            log.warning("bridge %r is at version %d, the pipeline at step %d", bridge, version, step)
        self.feed.begin_run(version)

    def _end_before(self, step: int) -> None:
        """Ends the groups whose last possible step is before this one."""
        with self._lock:
            over = [name for name, (put, _) in self._held.items() if put + self._lag < step]
            groups = [self._held.pop(name)[1] for name in over]
        if groups and self._told:  # the pipeline would have told that it trained them
            self.feed.dropped(groups, "by_roll")
        elif groups:
            self.feed.trained(groups)
        if self.feed.consumer.policy_version < (version := self._first_version + step):
            self.feed.consumer.publish_policy_version(version)

    def told(self, word: Mapping[str, Any]) -> None:
        """Does what `ShmAgenticPipeline` tells; again for the same word does nothing. Any thread.

        Args:
            word: `groups`, the names of groups that were trained, or, with `failed`, at which a step failed;
                `saved`, the states in a checkpoint that is durable, by bridge.

        Raises:
            Exception: the failure itself, where nothing is set aside.
        """
        with self._lock:
            over = [self._held.pop(name)[1] for name in word.get("groups", ()) if name in self._held]
        if over and (failed := word.get("failed")):
            self.feed.failed(over, (MemoryError if "Memory" in failed else RuntimeError)(failed))
        elif over:
            self.feed.trained(over)  # its version is published with the next step's weights
        if saved := word.get("saved", {}).get(self.feed.consumer.bridge):
            self.feed.checkpointed(saved)

    def take(self, stopped: Callable[[], bool]) -> Step | None:
        """Returns the next group, leased; None once `stopped()`. Blocks until then; any thread.

        Raises:
            Drained: nothing will come any more. BatchTooBig, UnfitRow, BridgeAhead: as Feed.take.
        """
        with self.feed.consumer.one_wait():
            while not stopped():
                try:
                    return self.feed.take(_LOOK_S, groups=1)
                except ConsumerEmpty:
                    continue
        return None

    def begun(self, step: Step) -> int | None:
        """Returns the pipeline's step whose weights began the group; None: nobody stamped it."""
        oldest = step.groups[0].oldest_version
        return oldest - self._first_version if oldest >= 0 else None

    def put(self, step: Step) -> str:
        """Notes that ROLL gets the group now, which is held until it is trained; returns the group's name.

        Never blocks.
        """
        name = json.dumps({"bridge": self.feed.consumer.bridge, **self.feed.state_of(step)})
        with self._lock:
            self._held[name] = self._step or 0, step
        return name

    def take_back(self, name: str, why: str) -> None:
        """Releases a group that ROLL did not take after all, counted as dropped. Never blocks."""
        with self._lock:
            _, step = self._held.pop(name)
        self.feed.dropped(step, why)
