"""Learner ranks: the hub's server for them, the shares of each rank, a rank's view of its share."""

__all__ = ["dealer", "held_share", "server", "share_book"]
