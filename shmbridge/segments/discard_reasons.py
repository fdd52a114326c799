"""Why records were dropped (never committed) or discarded (committed, then released unread), and episodes
lost: names and codes of the counters.

The codes are those of `_ext/c/layout.h`; the names are the `{reason}` of stats().
"""

from enum import IntEnum


class Drop(IntEnum):
    """Reasons counted by the producer in `dropped_total`."""

    FULL = 0
    CANCELLED = 1
    INVALID = 2
    TIMEOUT = 3


class Discard(IntEnum):
    """Reasons counted by the consumer in `discarded_total`."""

    STALE = 0
    PARTIAL = 1
    RESUME = 2
    CORRUPT = 3


class Lost(IntEnum):
    """Reasons counted by the producer in `episodes_lost_total`."""

    FAILED = 0
    LATE = 1
    TOO_OLD = 2


def labelled(counter: str, reasons: type[IntEnum], values: list[int]) -> dict[str, int]:
    """Returns `{"dropped_total{full}": 0, ...}` from the counters of a lane."""
    return {f"{counter}{{{reason.name.lower()}}}": values[reason] for reason in reasons}
