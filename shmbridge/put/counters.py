"""What a lane counts of its producer, flat."""

from shmbridge._ext import header
from shmbridge._ext.header import Mapping
from shmbridge.segments.discard_reasons import Drop, Lost, labelled


def lane_counters(lane: Mapping) -> dict[str, float]:
    """Returns the lane's counters, some of them per reason. Never blocks; any thread."""
    words = header.lane_counters(lane)
    return {
        "records_total": words["tail"],
        "bytes_total": words["bytes"],
        "tokens_total": words["tokens"],
        "wait_s": words["wait_ns"] / 1e9,
        "late_wakes_total": words["late_wakes"],
        "logprobs_unrecorded_total": words["logprobs_unrecorded"],
        "waiting": words["tail"] - words["head"],
        **labelled("dropped_total", Drop, words["dropped"]),
        **labelled("episodes_lost_total", Lost, words["episodes_lost"]),
    }
