"""The transport's copy of the arithmetic of the Atropos API server."""

__all__ = ["env_status", "queue"]
