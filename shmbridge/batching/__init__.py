"""From records to batches: forming, schedulers, staleness, prefetch."""

__all__ = ["former", "iteration", "queue", "request", "scheduler", "staleness"]
