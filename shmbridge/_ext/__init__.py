"""The compiled core: shared words, waiting, packing. Knows nothing of Python schemas, processes' roles or names."""
