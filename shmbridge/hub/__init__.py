"""The hub's own: its lanes, what it says to the whole bridge, waiting."""

__all__ = ["control_plane", "control_view", "counters", "lanes", "promises", "state", "waiting"]
