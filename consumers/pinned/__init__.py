"""Shared memory registered with CUDA, which a device reads and writes at the speed of pinned memory."""

__all__ = ["driver", "lanes", "weights"]
