"""From records to batches: forming, schedulers, staleness, batches formed ahead."""

__all__ = ["former", "iteration", "queue", "request", "scheduler", "staleness"]
