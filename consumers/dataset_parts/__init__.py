"""Parts of data sets and device batches: tensors, positions, pinned lanes."""
