"""The hub: its lanes, the bridge's state, waiting, admission."""

__all__ = [
    "control_plane",
    "control_view",
    "counters",
    "lanes",
    "latency",
    "promises",
    "state",
    "tap",
    "waiting",
]
