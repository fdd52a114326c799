"""The hub's own: its lanes, what it says to the whole bridge, waiting."""
