"""Lets verl 0.9 train on a machine without an accelerator, for a first try and for tests.

    export VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda PYTHONPATH=examples

verl knows accelerators only. Registered here, under verl's own registry: a platform whose device is the CPU
and whose collectives are gloo. Ray gets one GPU in its books (`ray_init.num_gpus=1`), because verl places its
workers by GPUs.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

CPU = torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    """What a CPU does about caches, streams and profilers."""


def _zero(*_: Any, **__: Any) -> int:
    return 0


# What verl asks of torch.cuda.
DEVICE = types.SimpleNamespace(
    empty_cache=_nothing,
    synchronize=_nothing,
    set_device=_nothing,
    reset_peak_memory_stats=_nothing,
    memory_allocated=_zero,
    max_memory_allocated=_zero,
    memory_reserved=_zero,
    max_memory_reserved=_zero,
    mem_get_info=lambda *_: (1 << 30, 1 << 30),
    current_device=lambda: CPU,
    device_count=lambda: 1,
    is_available=lambda: True,
    get_device_name=lambda *_: "CPU",
    get_rng_state=lambda *_: torch.get_rng_state(),
    set_rng_state=lambda state, *_: torch.set_rng_state(state),
)


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "nvidia"  # verl's engines are registered for it
    device_module = DEVICE

    manual_seed = staticmethod(torch.manual_seed)
    manual_seed_all = staticmethod(torch.manual_seed)
    set_device = set_allocator_settings = empty_cache = synchronize = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_ipc_supported(self) -> bool:
        return False

    def current_device(self) -> Any:
        return CPU

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


def _with_one_backend(initialise: Callable[..., None]) -> Callable[..., None]:
    """verl names a backend for the CPU and one for its device; torch refuses the same device twice."""

    def changed(backend: str | None = None, **more: Any) -> None:
        initialise(backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **more)

    return changed


torch.distributed.init_process_group = _with_one_backend(torch.distributed.init_process_group)
