"""Inference engines that take a policy's weights from a bridge; `weight_sync.py` pushes to them."""
