"""The reference policy of a KL term: a frozen copy of the model, or the model without its adapter."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shmbridge.consumers.learner.data.microbatch import MicroBatch
from shmbridge.consumers.learner.model.forward import trained_logprobs
from shmbridge.consumers.learner.model.lora import has_adapters, without_adapters


class Reference:
    """Log-probabilities under the policy before training.

    Args:
        model: the policy before training. With a peft LoRA adapter it is not copied: its adapter is disabled
            during the reference's forward passes. Any other model is copied.
        device: of the copy; None: the model's device.
    """

    def __init__(self, model: Any, device: torch.device | None = None) -> None:
        self._adapted = has_adapters(model)
        self._model = model if self._adapted else copy.deepcopy(model).eval().requires_grad_(False).to(device)

    def logprobs(self, micro: MicroBatch, *, precision: torch.dtype, chunk_tokens: int | None) -> Tensor:
        """Returns (n,) float32, nats, of the trained tokens, without gradient; else as `trained_logprobs`."""
        without: AbstractContextManager[Any] = (
            without_adapters(self._model) if self._adapted else nullcontext()
        )
        with torch.no_grad(), without:
            return trained_logprobs(
                self._model, micro, precision=precision, chunk_tokens=chunk_tokens, with_entropy=False
            )[0]
