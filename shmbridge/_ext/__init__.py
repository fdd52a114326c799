"""The compiled core: shared words, waiting, packing. Knows nothing of schemas, processes' roles or names."""
