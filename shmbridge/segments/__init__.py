"""Shared memory: segments, membership and sweeping, kernel locks, deaths, placement, limits, inventory."""

__all__ = [
    "at_exit",
    "closing",
    "death_watch",
    "discard_reasons",
    "engine_folders",
    "helper_threads",
    "inventory",
    "locks",
    "membership",
    "one_process",
    "one_thread",
    "os_limits",
    "placement",
    "receipts",
    "segment",
    "values",
]
