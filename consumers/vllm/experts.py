"""Expert layers on vLLM's CPU build: weights are packed when the kernel is made, and vLLM's own reload leaves
new weights unpacked. Other kinds of layers are not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from shmbridge.consumers.vllm.non_public_names import UnquantizedFusedMoEMethod

_MADE_WITH_THE_WEIGHTS = ("moe_kernel", "moe_quant_config")


@contextmanager
def packed_again(layer: Module, info: Any) -> Iterator[None]:
    """In the block, processing an expert layer packs it as the first time; afterwards the layer uses its
    earlier kernel.

    Args:
        layer: the layer about to be processed.
        info: vLLM's reload state of the layer: the memory that the kernel reads, where processing puts the
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
