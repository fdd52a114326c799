"""From records to batches: forming, schedulers, staleness, batches formed ahead."""
