"""From records to batches: forming, schedulers, staleness, prefetch."""

__all__ = ["former", "iteration", "iterator", "queue", "request", "scheduler", "screen", "staleness"]
