"""The counters of a consumer's lanes, flat: produced = released + held + discarded. Used by the consumer."""

from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.waiting import Waiting
from shmbridge.segments.placement import MemoryUse


def lane_counters(lanes: LaneSet, waiting: Waiting, memory: MemoryUse) -> dict[str, float]:
    """Returns the counters of all lanes, present and removed. Never blocks; any thread."""
    total = lanes.counters()
    reasons = {key: value for key, value in sorted(total.items()) if "{" in key}
    return {
        **{key: total[key] for key in ("records_total", "released_total", "held", "put_off")},
        **{key: total[key] for key in ("tokens_total", "bytes_total", "lane_bytes")},
        **memory.of(lane.reader.lane for lane in lanes),
        **{key: total[key] for key in ("leases_dropped_total", "leases_returned_total")},
        **reasons,
        "dropped_total": sum(value for key, value in reasons.items() if key.startswith("dropped")),
        "discarded_total": sum(value for key, value in reasons.items() if key.startswith("discarded")),
        "producer_wait_s": total["producer_wait_ns"] / 1e9,
        "wait_s": waiting.wait_s,
        "late_wakes_total": total["late_wakes_total"] + waiting.late_wakes,
        "lanes_live": lanes.live,
        "lanes_dead": len(lanes) - lanes.live,
        "lanes_quarantined": sum(lane.corrupt for lane in lanes),
        "lanes_refused": len(lanes.refused),
        "lanes_waiting": int(lanes.some_wait),
    }
