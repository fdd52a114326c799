"""The counters of a consumer, flat: produced = released + held + discarded. Used by its end."""

from collections.abc import Mapping
from typing import Protocol

from shmbridge.atropos.env_status import EnvWeight
from shmbridge.hub.control_plane import ControlPlane
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.latency import RecentLatency
from shmbridge.hub.state import HubState
from shmbridge.hub.waiting import Waiting
from shmbridge.segments.placement import MemoryUse


def lane_counters(lanes: LaneSet, waiting: Waiting, memory: MemoryUse) -> dict[str, float]:
    """Returns the counters of all lanes, present and removed. Never blocks; any thread."""
    total = lanes.counters()
    reasons = {key: value for key, value in sorted(total.items()) if "{" in key}
    return {
        **{key: total[key] for key in ("records_total", "released_total", "held", "put_off")},
        **{
            key: total[key]
            for key in ("tokens_total", "logprobs_unrecorded_total", "bytes_total", "lane_bytes")
        },
        **memory.of(lane.reader.lane for lane in lanes),
        **{key: total[key] for key in ("leases_dropped_total", "leases_returned_total")},
        **reasons,
        "dropped_total": sum(value for key, value in reasons.items() if key.startswith("dropped")),
        "discarded_total": sum(value for key, value in reasons.items() if key.startswith("discarded")),
        "episodes_lost_total": sum(
            value for key, value in reasons.items() if key.startswith("episodes_lost")
        ),
        "producer_wait_s": total["producer_wait_ns"] / 1e9,
        "wait_s": waiting.wait_s,
        "late_wakes_total": total["late_wakes_total"] + waiting.late_wakes,
        "lanes_live": lanes.live,
        "lanes_dead": len(lanes) - lanes.live,
        "lanes_quarantined": sum(lane.corrupt for lane in lanes),
        "lanes_refused": len(lanes.refused),
        "lanes_waiting": int(lanes.some_wait),
    }


class Counted(Protocol):
    """A part with counters of its own."""

    def stats(self) -> dict[str, float]:
        """Returns its counters, flat."""


class CountedQueue(Protocol):
    """The queue of groups, as far as the counters use it."""

    def stats(self, shares: Mapping[str, EnvWeight]) -> dict[str, float]:
        """Returns the groups in all, and by environment."""


class Counting:
    """Counts all parts of one consumer, but its ranks. One thread at a time; never blocks."""

    def __init__(
        self,
        state: HubState,
        lanes: LaneSet,
        waiting: Waiting,
        control_plane: ControlPlane,
        others: tuple[CountedQueue, Counted, Counted],
    ) -> None:
        self._state, self._lanes, self._waiting, self._control_plane = state, lanes, waiting, control_plane
        self._queue, self._former, self._admission = others
        self._memory, self._latency = MemoryUse(), RecentLatency()

    def stats(self) -> dict[str, float]:
        """Returns the counters."""
        return {
            **lane_counters(self._lanes, self._waiting, self._memory),
            **self._queue.stats(self._control_plane.env_shares()),
            **self._former.stats(),
            **self._state.waits(),
            **self._latency.stats(self._state.words.latency[0]),
            "policy_version": self._state.policy_version,
            **self._admission.stats(),
            **self._control_plane.stats(),
            **(self._lanes.tapped.stats() if self._lanes.tapped else {}),
        }
