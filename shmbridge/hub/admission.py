"""Which producer may begin a group, by the off-policy limit over running and committed groups.

Pure counting under one limit; docs/explanation/staleness.md has the rule, its proof, and its assumptions.
For the control plane's thread. Never blocks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmbridge._ext import header
from shmbridge.config import check_count
from shmbridge.control import messages
from shmbridge.errors import BadArgument, shown
from shmbridge.segments import MOST_TICKETS

if TYPE_CHECKING:
    from shmbridge.hub.hub import Hub

_MOST = 1 << 31
PROMISE_NS = 1_000_000_000  # how long a granted ticket is reserved for a producer that does not show it
_FULL_FOR_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class OffPolicyLimit:
    """At most (max_off_policy_steps + 1) * groups_per_step groups are generated, waiting, or trained with."""

    max_off_policy_steps: int
    groups_per_step: int

    def groups(self, unpublished: int = 0) -> int:
        """Returns that number, less the steps by which the weights in training are ahead of the published."""
        return (self.max_off_policy_steps + 1 - unpublished) * self.groups_per_step


def limit_of(
    max_off_policy_steps: int | None, groups_per_step: int | None, policy: str
) -> OffPolicyLimit | None:
    """Returns the limit a consumer is to keep, or None. Raises BadArgument if it cannot be kept."""
    if max_off_policy_steps is None:
        if groups_per_step is not None:
            raise BadArgument(
                f"groups_per_step={shown(groups_per_step)} is for max_off_policy_steps, and that is None",
                hint="max_off_policy_steps=2, or leave groups_per_step out",
            )
        return None
    steps = check_count("max_off_policy_steps", max_off_policy_steps, 0, _MOST)
    if groups_per_step is None:
        raise BadArgument(
            f"max_off_policy_steps={steps} without groups_per_step, the groups of a batch",
            hint="groups_per_step=8, as batches(groups=8)",
        )
    groups_per_step = check_count("groups_per_step", groups_per_step, 1, _MOST)
    if policy != "oldest":
        raise BadArgument(
            f"policy={shown(policy)} lets newer groups overtake older ones, and max_off_policy_steps={steps}",
            hint='policy="oldest"',
        )
    return OffPolicyLimit(steps, groups_per_step)


@dataclass(slots=True)
class Promises:
    """Granted tickets that their lanes do not show yet: per lane, how many it will hold, and until when."""

    _by_lane: dict[str, tuple[int, int]] = field(default_factory=dict)

    def promise(self, lane: str, tickets: int, now_ns: int) -> None:
        """Counts `tickets` of the lane as held for PROMISE_NS."""
        self._by_lane[lane] = tickets, now_ns + PROMISE_NS

    def void(self, lane: str) -> None:
        """Voids the lane's promise: its producer asks again, so it will not use a late answer."""
        self._by_lane.pop(lane, None)

    def running(self, held: Mapping[str, int], now_ns: int) -> int:
        """Returns the number of groups being generated: per lane max(tickets held, tickets promised).

        Drops redeemed and expired promises.
        """
        self._by_lane = {
            lane: (tickets, until_ns)
            for lane, (tickets, until_ns) in self._by_lane.items()
            if now_ns < until_ns and lane in held and held[lane] < tickets
        }
        return sum(max(tickets, self._by_lane.get(lane, (0, 0))[0]) for lane, tickets in held.items())


class Admission:
    """Admits groups. `committed` counts committed groups whose step is not over; None while they move."""

    def __init__(self, hub: "Hub") -> None:
        self._state, self._lanes, self._committed = hub.state, hub.lanes, hub.former.committed
        self._promises, self._begun = Promises(), 0
        # (deadline_ns, steps): the answer stays "full" until then, unless another step ends.
        self._full = 0, -1

    def begin_group(
        self, request: messages.BeginGroup
    ) -> messages.MayBegin | messages.Full | messages.Refused | None:
        """Returns whether a producer may begin one more group; None: not yet."""
        if not 0 <= request.running < MOST_TICKETS:
            said = f"a lane holds 0 to {MOST_TICKETS} tickets, so none more than {request.running}"
            return messages.Refused(messages.BAD_VALUE, said, "say how many it holds")
        # Read the clock first: a promise expired before this instant is already redeemed or never will be.
        now_ns = time.monotonic_ns()
        if self._state.paused:
            return None
        if self._state.limit is not None:
            if request.lane in self._lanes.refused:
                said = f"lane {request.lane} is refused by this consumer, which reads nothing of it"
                return messages.Refused(messages.BAD_VALUE, said, "see the consumer's log")
            self._promises.void(request.lane)
            steps = self._state.steps_ended
            # Reuse one count for all waiting producers.
            if request.wait and now_ns < self._full[0] and steps == self._full[1]:
                return None
            # Count tickets before committed groups: a group is committed before its ticket ends.
            held = self._lanes.tickets()
            running, committed = self._promises.running(held, now_ns), self._committed()
            # groups are being moved; or the lane is not adopted yet
            if committed is None or request.lane not in held:
                return None
            # After the count, so that a step that has just ended is included.
            most = self._state.limit.groups(self._state.unpublished)
            if running + committed >= most:
                self._full = now_ns + _FULL_FOR_NS, steps
                return None if request.wait else messages.Full(most, running, committed)
            self._promises.promise(request.lane, request.running + 1, now_ns)
        self._begun += 1
        header.fault(b"hub.ticket_promised")
        until_ns = now_ns + PROMISE_NS
        # Read the version last: it is no older than the count.
        return messages.MayBegin(self._state.hub_epoch, self._state.policy_version, until_ns)

    def stats(self) -> dict[str, float]:
        """Returns the counters, flat. Any thread."""
        limit = self._state.limit
        return {
            **({} if limit is None else {"groups_limit": limit.groups(self._state.unpublished)}),
            "groups_running": sum(self._lanes.tickets().values()),
            "groups_begun_total": self._begun,
        }
