"""The memory that vLLM's CPU build packs a linear layer's weights from: the segment itself, or a buffer
reused for each layer. vLLM's own reload assembles each layer in new memory, whose zeroed pages cost several
times the copy. Other kinds of layers are left to vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from shmbridge.consumers.vllm.non_public_names import LinearBase, UnquantizedLinearMethod


class Staging:
    """A buffer for one layer's weights at a time. For one thread."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def lend(self, layer: Module, info: Any) -> None:
        """Gives a layer about to be processed memory for its weights, if processing does not keep them there.

        Never blocks.

        Args:
            layer: a layer with staged weights that is still on the meta device.
            info: vLLM's reload state of the layer; a weight used in place is removed from the copies to make.
        """
        if not _is_packed(layer, info):
            return
        wanted: Tensor = layer._parameters["weight"]  # type: ignore[assignment]
        given = [call.arguments.values() for name, call in info.loaded_weights if name == "weight"]
        tensors = [
            each for values in given for each in values if isinstance(each, Tensor) and not each.is_meta
        ]
        if len(given) == 1 and _lies_as(tensors[0], wanted):
            place = tensors[0].detach()
            info.loaded_weights = [each for each in info.loaded_weights if each[0] != "weight"]
        else:
            place = self._place(wanted)
        place.__class__ = wanted.__class__
        place.__dict__ = wanted.__dict__.copy()
        layer.weight = place

    def _place(self, wanted: Tensor) -> Tensor:
        if self._memory.numel() < wanted.nbytes:
            self._memory = torch.empty(wanted.nbytes, dtype=torch.uint8)
        return self._memory[: wanted.nbytes].view(wanted.dtype).view(wanted.shape)


def _lies_as(tensor: Tensor, wanted: Tensor) -> bool:
    same = tensor.shape == wanted.shape and tensor.dtype == wanted.dtype
    return same and tensor.is_contiguous() and tensor.device.type == "cpu"


def _is_packed(layer: Module, info: Any) -> bool:
    """Returns whether processing moves the weights into oneDNN's memory, so that none stays here."""
    if not isinstance(layer, LinearBase) or not isinstance(layer.quant_method, UnquantizedLinearMethod):
        return False
    cells = getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ()
    held = info.kernel_tensors[0].get("weight")
    wanted = layer._parameters.get("weight")
    if (
        not cells
        or held is None
        or held.numel()
        or wanted is None
        or not wanted.is_meta
        or not wanted.is_contiguous()
    ):
        return False
    return not any(isinstance(cell.cell_contents, Tensor) for cell in cells)
