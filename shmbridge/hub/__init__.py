"""The hub: its lanes, the bridge's state, waiting, admission."""

__all__ = [
    "control_plane",
    "control_view",
    "counters",
    "ending",
    "lanes",
    "own_hubs",
    "promises",
    "state",
    "tap",
    "waiting",
]
