"""Shared memory: segments, membership and sweeping, kernel locks, deaths, placement, limits, inventory."""

__all__ = [
    "at_exit",
    "closing",
    "death_watch",
    "engine_folders",
    "in_thread",
    "inventory",
    "locks",
    "membership",
    "one_process",
    "one_thread",
    "os_limits",
    "placement",
    "reasons",
    "segment",
]
