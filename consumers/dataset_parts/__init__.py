"""What data sets and device batches are made of: tensors, positions, pinned lanes."""
