"""A consumer as its control server sees it, and the calls that change the whole bridge's state.

Takes no records and never blocks. Any thread.
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
    """The batch former, as far as the hub view uses it."""

    @property
    def steps(self) -> int:
        """Steps of all runs."""

    def end_step(self) -> None:
        """Ends the step: the policy now includes the last batch handed out."""


class Queue(Protocol):
    """The groups that are committed and in no batch yet, as far as the hub view uses them."""

    def groups(self) -> int:
        """Returns the groups of all producers."""

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """Returns, per producer id, whether it lives and its number of groups."""


class Ranks(Protocol):
    """The rank server, as far as the hub view uses it."""

    def next_share(
        self, request: messages.NextShare
    ) -> messages.Manifest | messages.NoMoreShares | messages.Refused | None:
        """Returns the rank's next share; None while there is none."""

    def shares_done(self, request: messages.SharesDone) -> messages.Ack | messages.Refused:
        """Notes that a learner rank is done with shares."""


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
        self.refused_lanes = lanes.refused_lanes
        self.queue_groups, self.look_at_producers = queue.groups, queue.look_at_producers
        self.ranks: Ranks | None = None

    def described(self) -> str:
        """Returns what `repr` says of the consumer."""
        if self._closing.over:
            return "closed"
        words = [
            f"epoch {self.hub_epoch}",
            f"{len(self._lanes)} lanes",
            f"{self.queue_groups()} groups queued",
        ]
        states = {"pausing": self.paused, "draining": self.draining, "serves ranks": self.ranks is not None}
        return ", ".join(words + [state for state, is_so in states.items() if is_so])

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
    def publish_policy_version(
        self, version: int, run_id: str | None = None, same_as: int | None = None
    ) -> None:
        """See Consumer.publish_policy_version."""
        self._state.publish(version, run_id, same_as)
        self._batches.end_step()  # after the store: a group that begins now begins under this version

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
