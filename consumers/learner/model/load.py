"""Loads the learner's model from a folder or a Hugging Face id to its device, with adapters and reference."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from shmbridge.consumers import pretrained
from shmbridge.consumers.learner import Refusal
from shmbridge.consumers.learner.config.options import AdapterConfig, ComputeConfig, LearnerConfig
from shmbridge.consumers.learner.data.microbatch import Layout, MicroBatch
from shmbridge.consumers.learner.model import attention
from shmbridge.consumers.learner.model.forward import trained_logprobs
from shmbridge.consumers.learner.model.lora import (
    Lora,
    add_adapters,
    differences,
    has_adapters,
    is_adapter,
    prepare_adapters,
    without_adapters,
)
from shmbridge.consumers.learner.model.optimizer import cast_parameters
from shmbridge.consumers.learner.world import World, device_kind, say
from shmbridge.errors import BadArgument


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


class StartupError(Refusal):
    """The learner cannot start; the message says why and what to do."""


def device_of(compute: ComputeConfig, world: World) -> torch.device:
    """Returns the device of this rank and makes it the current one. Raises `StartupError` for none."""
    if device_kind(compute.device) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError(
            "--device cuda: torch sees no GPU here -> --device cpu, or mend torch and the driver"
        )
    if world.size == 1:
        return torch.device("cuda")
    if world.local_rank >= torch.cuda.device_count():
        raise StartupError(
            f"local rank {world.local_rank} has no GPU: there are {torch.cuda.device_count()} -> "
            "start as many processes as GPUs with torchrun --nproc-per-node, or give --device cpu"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def load_model(
    source: Path | str, compute: ComputeConfig, adapters: AdapterConfig, device: torch.device
) -> Any:
    """Returns the model on a device, with the configured dtype and adapters. Blocks for the disk.

    Raises:
        BadArgument: there is no such model, or it cannot be loaded.
        StartupError: a checkpoint cannot be loaded, or its adapters are others.
        PeftMissing, BadAdapter: as `add_adapters`.
    """
    try:
        model = pretrained.load(AutoModelForCausalLM, source).float()
    except BadArgument as error:
        if not isinstance(source, Path) or error.__cause__ is None:  # without: an adapter's base is not there
            raise
        raise StartupError(
            f"{error.message} -> put {source.name} elsewhere: --resume takes the one before it"
        ) from error
    base = (parameter for name, parameter in model.named_parameters() if not is_adapter(name))
    cast_parameters(base, getattr(torch, compute.param_dtype))
    _adapt(model, source, adapters)
    model.to(device)
    if compute.gradient_checkpointing:
        # transformers 5.23 renamed this and warns of the old name. The re-entrant form hides gradients from
        # DDP.
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
        _compute_again(model)
    return model


def _compute_again(model: Any) -> None:
    """Turns on gradient checkpointing, which needs training mode, and turns dropout off.

    With dropout, the trained policy would differ from the sampling one: every ratio would be noise.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name in [
                name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)
            ]:
                setattr(module, name, 0.0)


def _adapt(model: Any, source: Path | str, adapters: AdapterConfig) -> None:
    """Adds adapters, or prepares those of a checkpoint."""
    loaded, rank = has_adapters(model), adapters.lora_rank or 0
    if isinstance(source, Path) and loaded != bool(rank):
        there, wanted = ("", "without") if loaded else ("no ", "with")
        raise StartupError(
            f"{source} has {there}adapters, and the options ask for a model {wanted} -> the --lora-* of "
            "that run"
        )
    lora = Lora(rank, adapters.lora_alpha or 2.0 * rank, adapters.lora_dropout, adapters.lora_targets)
    if loaded:
        if isinstance(source, Path) and (others := differences(model, lora)):
            raise StartupError(f"{source} was trained with {', '.join(others)} -> resume with the same")
        prepare_adapters(model)
    elif rank:
        add_adapters(model, lora, str(source))


def load_tokenizer(source: Path | str) -> Any:
    """Returns the tokenizer stored beside a model, or None. Blocks for the disk."""
    try:
        return pretrained.load(AutoTokenizer, source)
    except Exception as error:  # the library may raise anything, and training needs no tokenizer
        say(f"no tokenizer beside {source}, so none in the checkpoints: {type(error).__name__}")
        return None


def load_reference(
    model: Any, source: Path | None, config: LearnerConfig, device: torch.device, layout: Layout
) -> Reference | None:
    """Returns the reference of the KL term, if any: the configured model, whole on every rank."""
    if not config.objective.kl_coef:
        return None
    if source is None or has_adapters(model):
        return Reference(model, device)
    first = load_model(config.run.model, config.compute, config.adapters, device)
    attention.settle(first, layout, getattr(torch, config.compute.precision), say)
    return Reference(first, device)
