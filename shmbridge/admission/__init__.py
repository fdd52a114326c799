"""How many groups may be under way: the off-policy limit, and tickets to begin a group."""

__all__ = ["limit", "tickets"]
