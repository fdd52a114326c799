"""The learner's batches: their source, and their conversion to training arrays."""
