"""The hub's own: its lanes, what it says to the whole bridge, waiting."""

__all__ = ["admission", "control_plane", "counters", "lanes", "state", "view", "waiting"]
