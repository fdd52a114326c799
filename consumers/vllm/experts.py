"""Experts on vLLM's CPU build: it packs their weights when it makes their kernel, and a reload of its own
leaves new ones unpacked.

Knows the method that vLLM has for a layer of experts; a layer of another kind is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from shmbridge.consumers.vllm.release import UnquantizedFusedMoEMethod

_MADE_WITH_THE_WEIGHTS = ("moe_kernel", "moe_quant_config")


@contextmanager
def packed_anew(layer: Module, info: Any) -> Iterator[None]:
    """Inside, processing a layer of experts packs it as if it were the first time; afterwards it computes
    with the kernel that it had.

    Args:
        layer: one that is about to be processed.
        info: what vLLM's reload knows of it: the memory that the kernel reads, where processing leaves the
            new weights.
    """
    method: Any = getattr(layer, "quant_method", None)
    held = [each for group in info.kernel_tensors for each in group.values()]
    if not isinstance(method, UnquantizedFusedMoEMethod) or any(each.device.type != "cpu" for each in held):
        yield
        return
    made = {name: getattr(method, name) for name in _MADE_WITH_THE_WEIGHTS}
    method.moe_kernel = None
    try:
        yield
    finally:
        for name, each in made.items():
            setattr(method, name, each)
