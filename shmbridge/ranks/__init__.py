"""Learner ranks: the hub's server for them, who gets which share, what a rank reads of it."""

__all__ = ["held_share", "server", "share_book"]
