"""How stale a record is, and what of a limit; a bounded histogram.

Pure arithmetic on policy versions; knows nothing of records' bytes.
"""

from collections.abc import Iterable

MOST_LAG = 7  # versions that are told apart; what is staler counts as one

LAGS = (*map(str, range(MOST_LAG + 1)), f"over_{MOST_LAG}", "unknown")


def staleness(stamped: int, current: int) -> int:
    """Versions between the one a record began under and the current one; 0 where either is unknown (-1)."""
    return max(current - stamped, 0) if stamped >= 0 and current >= 0 else 0


def is_stale(stamped: int, current: int, max_staleness: int | None) -> bool:
    """Whether a record is beyond the limit. Without a limit nothing is; a record nobody stamped never is."""
    return max_staleness is not None and staleness(stamped, current) > max_staleness


def staleness_of(stamped: int, current: int) -> str:
    """Which bar of a histogram it is: one of LAGS."""
    if stamped < 0 or current < 0:
        return "unknown"
    lag = staleness(stamped, current)
    return str(lag) if lag <= MOST_LAG else f"over_{MOST_LAG}"


class StalenessHistogram:
    """How many groups were so many versions old when their batch was handed out.

    One thread counts; any may ask.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(LAGS, 0)
        self._largest = 0
        self._ahead = 0

    def count(self, stamped: Iterable[int], current: int) -> None:
        """Counts groups by the version each began under."""
        for version in stamped:
            self._counts[staleness_of(version, current)] += 1
            self._ahead += version > current
            self._largest = max(self._largest, staleness(version, current))

    def stats(self) -> dict[str, float]:
        """`staleness_groups_total{lag}`, the largest seen, and groups stamped with a version that nobody has
        published.
        """
        lags = {f"staleness_groups_total{{{lag}}}": count for lag, count in self._counts.items()}
        return {**lags, "staleness_max": self._largest, "policy_version_ahead_total": self._ahead}
