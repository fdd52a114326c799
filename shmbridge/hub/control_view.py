"""A consumer as its control server sees it, and what it says to the whole bridge.

Knows the parts of a consumer that answer; takes no records, and never blocks. Any thread.
"""

from collections.abc import Collection
from typing import Protocol

from shmbridge.config import Run, check_run
from shmbridge.control import messages
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.promises import Admission
from shmbridge.hub.state import HubState
from shmbridge.segments.closing import Closing, then_close


class Batches(Protocol):
    """What forms batches, as this sees it."""

    @property
    def steps(self) -> int:
        """Steps of all runs."""

    def end_step(self) -> None:
        """What was handed out last is in the policy now."""


class Queue(Protocol):
    """What is committed and in no batch yet, as this sees it."""

    def groups(self) -> int:
        """Of all producers."""

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """Of each: whether it lives, and its groups."""


class Ranks(Protocol):
    """What answers learner ranks, as this sees it."""

    def next_share(
        self, request: messages.NextShare
    ) -> messages.Manifest | messages.NoMoreShares | messages.Refused | None:
        """The rank's next share; None while there is none."""

    def shares_done(self, request: messages.SharesDone) -> messages.Ack | messages.Refused:
        """A learner rank is done with shares."""


class Hub:
    """See environments.HubView."""

    def __init__(
        self,
        state: HubState,
        lanes: LaneSet,
        batches: Batches,
        queue: Queue,
        admission: Admission,
        closing: Closing,
    ) -> None:
        self._state, self._lanes, self._batches, self._closing = state, lanes, batches, closing
        self.begin_group = admission.begin_group
        self.queue_groups, self.look_at_producers = queue.groups, queue.look_at_producers
        self.ranks: Ranks | None = None

    @property
    def hub_epoch(self) -> int:
        """See HubView."""
        return self._state.hub_epoch

    @property
    def run(self) -> Run | None:
        """See HubView."""
        return self._state.run

    @property
    def current_step(self) -> int:
        """See Consumer.current_step."""
        return self._state.current_step(self._batches.steps)

    @property
    def policy_version(self) -> int:
        """See HubView."""
        return self._state.policy_version

    @property
    def paused(self) -> bool:
        """See HubView."""
        return self._state.paused

    @property
    def draining(self) -> bool:
        """See HubView."""
        return self._state.draining

    def announce_run(self, run: Run) -> None:
        """See Consumer.announce_run."""
        self._state.announce(check_run(run), self._batches.steps)

    @then_close
    def publish_policy_version(self, version: int) -> None:
        """See Consumer.publish_policy_version."""
        self._state.publish(version)
        self._batches.end_step()  # after the store: what begins now begins under this version

    def pause(self) -> None:
        """See HubView."""
        self._state.paused = True

    def resume(self) -> None:
        """See HubView."""
        self._state.paused = False
        self._lanes.ring_all()

    def drain(self) -> None:
        """See HubView."""
        self._state.drain()
        self._lanes.ring_all()
        self._state.ring()

    def next_share(
        self, request: messages.NextShare
    ) -> messages.Manifest | messages.NoMoreShares | messages.Refused | None:
        """See HubView; None before ranks are served."""
        return None if self.ranks is None else self.ranks.next_share(request)

    def shares_done(self, request: messages.SharesDone) -> messages.Ack | messages.Refused:
        """See HubView."""
        if self.ranks is not None:
            return self.ranks.shares_done(request)
        said = f"the consumer of bridge {self._state.bridge!r} hands out no shares"
        return messages.Refused(messages.NO_RANKS, said, "call Consumer.serve_ranks in it")
