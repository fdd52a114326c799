"""Inference engines that take a policy's weights from a bridge, behind one interface; `weight_sync.py` next
door pushes to them.
"""
