"""The learner's batches: where they come from, and what they say about training."""
