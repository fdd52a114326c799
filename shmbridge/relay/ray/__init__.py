"""Relays as actors of Ray: where they run, how they find each other, and what is said of them."""

__all__ = ["directory", "place"]
