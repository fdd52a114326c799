"""Which producer may begin a group: the limit over what is being generated, waits, or is trained with.

Knows promises and tickets; the rule is admission/limit.py's. For the control plane's thread. Never blocks.
"""

import time
from collections.abc import Callable

from shmbridge._ext import header
from shmbridge.admission.limit import PROMISE_NS, OffPolicyLimit, Promises
from shmbridge.control import messages
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.state import HubState
from shmbridge.segments import locks

_FULL_FOR_NS = 10_000_000


class Admission:
    """`committed` counts the committed groups whose step is not over; None while they are being moved."""

    def __init__(self, state: HubState, lanes: LaneSet, committed: Callable[[], int | None]) -> None:
        self._state, self._lanes, self._committed = state, lanes, committed
        self._promises, self._begun = Promises(), 0
        self._full = 0, -1  # the answer is "full" until that time, unless another step has ended than that

    def begin_group(
        self, request: messages.BeginGroup
    ) -> messages.MayBegin | messages.Full | messages.Refused | None:
        """Whether a producer may begin one group more; None: not yet."""
        if not 0 <= request.running < locks.MOST_TICKETS:
            said = f"a lane holds 0 to {locks.MOST_TICKETS} tickets, so none more than {request.running}"
            return messages.Refused(messages.BAD_VALUE, said, "say how many it holds")
        # First: a promise that has expired by now is redeemed by now, or never will be.
        now_ns = time.monotonic_ns()
        if self._state.paused:
            return None
        if self._state.limit is not None:
            if request.lane in self._lanes.refused:
                said = f"lane {request.lane} is refused by this consumer, which reads nothing of it"
                return messages.Refused(messages.BAD_VALUE, said, "see the consumer's log")
            self._promises.void(request.lane)
            steps = self._state.steps_ended
            # Others wait too: one count is for all.
            if request.wait and now_ns < self._full[0] and steps == self._full[1]:
                return None
            # Before what is committed: a group is committed before its ticket ends.
            held = self._lanes.tickets()
            running, committed = self._promises.running(held, now_ns), self._committed()
            if committed is None or request.lane not in held:  # they are being moved; it is not adopted yet
                return None
            # After the count: a step that ended meanwhile is known.
            most = self._most_groups(self._state.limit)
            if running + committed >= most:
                self._full = now_ns + _FULL_FOR_NS, steps
                return None if request.wait else messages.Full(most, running, committed)
            self._promises.promise(request.lane, request.running + 1, now_ns)
        self._begun += 1
        header.fault(b"hub.ticket_promised")
        until_ns = now_ns + PROMISE_NS
        # The version last: it is no older than the count.
        return messages.MayBegin(self._state.hub_epoch, self._state.policy_version, until_ns)

    def _most_groups(self, limit: OffPolicyLimit) -> int:
        """How many may be under way now."""
        return limit.groups(self._state.unpublished)

    def stats(self) -> dict[str, float]:
        """Counters, flat. Any thread."""
        limit = self._state.limit
        return {
            **({} if limit is None else {"groups_limit": self._most_groups(limit)}),
            "groups_running": sum(self._lanes.tickets().values()),
            "groups_begun_total": self._begun,
        }
