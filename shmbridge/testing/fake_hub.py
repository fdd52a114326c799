"""A hub without lanes, for the control plane: implements `HubView` with plain fields.

Used by tests of the control plane and of its clients.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from shmbridge.config import Run
from shmbridge.control.messages import (
    NO_RANKS,
    Ack,
    BeginGroup,
    Full,
    Manifest,
    MayBegin,
    NextShare,
    NoMoreShares,
    Refused,
    SharesDone,
)


@dataclass
class FakeHub:
    """Every field can be set; `queued` is groups per producer id, `live` the ids of living producers."""

    hub_epoch: int = 1
    run: Run | None = field(default_factory=lambda: Run(batch_size=16, num_steps=50))
    current_step: int = 0
    policy_version: int = -1
    paused: bool = False
    draining: bool = False
    queued: dict[str, int] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    announced: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    def refused_lanes(self) -> dict[str, str]:
        """Returns `refused`."""
        return self.refused

    def announce_run(self, run: Run) -> None:
        """Stores the run, and counts the call."""
        self.run = run
        self.announced += 1

    def publish_policy_version(self, version: int) -> None:
        """Stores the version; ValueError if it goes backwards, as in a consumer."""
        if version < self.policy_version:
            raise ValueError(f"policy version {version} is before {self.policy_version}")
        self.policy_version = version

    def pause(self) -> None:
        """Sets `paused`."""
        self.paused = True

    def resume(self) -> None:
        """Clears `paused`."""
        self.paused = False

    def drain(self) -> None:
        """Sets `draining`."""
        self.draining = True

    def queue_groups(self, producer_id: str | None = None) -> int:
        """Returns the groups waiting, of one producer or of all."""
        return sum(self.queued.values()) if producer_id is None else self.queued.get(producer_id, 0)

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """Returns, per producer id, whether it is in `live`, and its groups."""
        return {each: (each in self.live, self.queue_groups(each)) for each in producer_ids}

    def next_share(self, request: NextShare) -> Manifest | NoMoreShares | Refused | None:
        """Returns Refused: there are no ranks here."""
        return Refused(NO_RANKS, "no real hub", "use a Consumer")

    def shares_done(self, request: SharesDone) -> Ack | Refused:
        """Returns Refused: there are no ranks here."""
        return Refused(NO_RANKS, "no real hub", "use a Consumer")

    def begin_group(self, request: BeginGroup) -> MayBegin | Full | Refused | None:
        """Returns MayBegin always: there is no limit here."""
        return MayBegin(self.hub_epoch, self.policy_version, 1 << 62)
