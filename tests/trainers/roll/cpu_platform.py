"""What ROLL's CPU platform lacks, for a machine without GPUs: `complete`, and `declare_devices`.

ROLL asks its platform for memory counters and random states; `CpuPlatform` asks torch.cpu, which has none.
"""

from types import SimpleNamespace

import torch
from roll.platforms.cpu import CpuPlatform


def complete() -> None:
    """Gives `CpuPlatform` the counters and random states that ROLL asks for; they say nothing of memory."""
    for name in (
        "empty_cache",
        "init",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "reset_peak_memory_stats",
    ):
        setattr(CpuPlatform, name, staticmethod(lambda *_: None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(CpuPlatform, name, staticmethod(lambda *_: 0))
    CpuPlatform.mem_get_info = staticmethod(lambda *_: (1, 1))
    CpuPlatform.device_memory_used = staticmethod(lambda *_: 0)
    CpuPlatform.random = SimpleNamespace(get_rng_state_all=list, set_rng_state_all=lambda _: None)
    CpuPlatform.get_rng_state = staticmethod(torch.get_rng_state)
    CpuPlatform.set_rng_state = staticmethod(torch.set_rng_state)


def declare_devices(count: int) -> None:
    """Lets ROLL place its workers on devices that Ray was told of (`ray.init(num_gpus=count)`); none exists.

    For a CPU platform ROLL asks Ray for `resources={"CPU": n}` (resource_manager.py:56), which Ray refuses.
    """
    CpuPlatform.device_count = staticmethod(lambda: count)
    CpuPlatform.ray_device_key = "GPU"
    CpuPlatform.device_control_env_var = "CUDA_VISIBLE_DEVICES"
    CpuPlatform.ray_experimental_noset = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
