"""`shmbridge doctor`: what this host has of what a bridge needs. Used by the command alone."""

__all__ = ["check", "examination"]
