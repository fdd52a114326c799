"""Decides which producer may begin a group, by the off-policy limit over running and committed groups.

The rule itself is in admission/limit.py. For the control plane's thread. Never blocks.
"""

import time
from collections.abc import Callable

from shmbridge._ext import header
from shmbridge.admission.limit import PROMISE_NS, Promises
from shmbridge.control import messages
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.state import HubState
from shmbridge.segments import locks

_FULL_FOR_NS = 10_000_000


class Admission:
    """Admits groups. `committed` counts committed groups whose step is not over; None while they move."""

    def __init__(self, state: HubState, lanes: LaneSet, committed: Callable[[], int | None]) -> None:
        self._state, self._lanes, self._committed = state, lanes, committed
        self._promises, self._begun = Promises(), 0
        # (deadline_ns, steps): the answer stays "full" until then, unless another step ends.
        self._full = 0, -1

    def begin_group(
        self, request: messages.BeginGroup
    ) -> messages.MayBegin | messages.Full | messages.Refused | None:
        """Returns whether a producer may begin one more group; None: not yet."""
        if not 0 <= request.running < locks.MOST_TICKETS:
            said = f"a lane holds 0 to {locks.MOST_TICKETS} tickets, so none more than {request.running}"
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
