"""Percentiles of how long the records that a hub took lately had waited for it."""

import time
from collections.abc import Sequence

from shmbridge.counters import LATENCY_BOUNDS_S

_WINDOW_S = 30.0  # at least; at most as long again, or as long as nobody asked
_PERCENTILES = (50, 99)


class RecentLatency:
    """From the hub's counts, which only rise. Never blocks; one thread at a time."""

    def __init__(self) -> None:
        self._since: Sequence[int] = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._next_since: Sequence[int] = self._since
        self._next_at = time.monotonic()

    def stats(self, counts: Sequence[int], now_s: float | None = None) -> dict[str, float]:
        """Returns `latency_us_p50` and `latency_us_p99` of the last half minute or so; none without records.

        Args:
            counts: records by bucket, since the hub began.
            now_s: time.monotonic(); None for now.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if now_s - self._next_at >= _WINDOW_S:
            self._since, self._next_since, self._next_at = self._next_since, counts, now_s
        lately = [count - before for count, before in zip(counts, self._since, strict=True)]
        if not sum(lately):
            return {}
        return {f"latency_us_p{p}": percentile_s(lately, p) * 1e6 for p in _PERCENTILES}


def percentile_s(counts: Sequence[int], percent: float) -> float:
    """Returns a percentile of the records in these buckets, in seconds; evenly spread within each bucket.

    One beyond the largest bound is that bound.
    """
    rank, below = percent / 100 * sum(counts), 0
    for count, low, high in zip(counts, (0.0, *LATENCY_BOUNDS_S), LATENCY_BOUNDS_S, strict=False):
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return LATENCY_BOUNDS_S[-1]
