"""How stale a record is, and what of a limit. Pure arithmetic on policy versions; knows nothing of records' bytes."""


def staleness(stamped: int, current: int) -> int:
    """Versions between the one a record began under and the current one; 0 where either is unknown (-1)."""
    return max(current - stamped, 0) if stamped >= 0 and current >= 0 else 0


def is_stale(stamped: int, current: int, max_staleness: int | None) -> bool:
    """Whether a record is beyond the limit. Without a limit nothing is; a record nobody stamped never is."""
    return max_staleness is not None and staleness(stamped, current) > max_staleness
