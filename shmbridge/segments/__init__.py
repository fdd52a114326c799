"""Shared memory: segments, membership and sweeping, kernel locks, deaths, placement, limits, inventory."""
