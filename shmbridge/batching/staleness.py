"""How stale a record is, whether that exceeds a limit, and a bounded histogram."""

from collections.abc import Iterable

MOST_LAG = 7  # staleness values counted one by one; anything staler shares one bar

LAGS = (*map(str, range(MOST_LAG + 1)), f"over_{MOST_LAG}", "unknown")


def staleness(stamped: int, current: int) -> int:
    """Returns the versions between the stamped and the current one; 0 where either is unknown (-1)."""
    return max(current - stamped, 0) if stamped >= 0 and current >= 0 else 0


def is_stale(stamped: int, current: int, max_staleness: int | None) -> bool:
    """Returns whether a record exceeds the limit; None is no limit, and an unstamped record never does."""
    return max_staleness is not None and staleness(stamped, current) > max_staleness


def staleness_of(stamped: int, current: int) -> str:
    """Returns the histogram bar of a staleness: one of LAGS."""
    if stamped < 0 or current < 0:
        return "unknown"
    lag = staleness(stamped, current)
    return str(lag) if lag <= MOST_LAG else f"over_{MOST_LAG}"


class StalenessHistogram:
    """A histogram of groups' staleness at the hand-out of their batch. One thread counts; any may read."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(LAGS, 0)
        self._largest = 0
        self._ahead = 0

    def count(self, stamped: Iterable[int], current: int) -> None:
        """Counts groups by the version under which each began."""
        for version in stamped:
            self._counts[staleness_of(version, current)] += 1
            self._ahead += version > current
            self._largest = max(self._largest, staleness(version, current))

    def stats(self) -> dict[str, float]:
        """Returns `staleness_groups_total{lag}`, the largest staleness, and groups of future versions."""
        lags = {f"staleness_groups_total{{{lag}}}": count for lag, count in self._counts.items()}
        return {**lags, "staleness_max": self._largest, "policy_version_ahead_total": self._ahead}
