"""Two ranks over gloo share a model, a trainer's hook publishes it, and a reader finds it, bit for bit.

A trainer's tests call `assert_published`; the ranks are forks of a process that has imported the trainer.
"""

import os
import socket
import subprocess
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
STEPS = 2
# verl installs a package `tests` of its own
RANKS = f"""
import sys, types
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [{str(ROOT / "tests")!r}]
from tests.trainers.weights_contract import main
main(*sys.argv[1:])
"""


def model() -> torch.nn.Module:
    """Returns the same small model on every call: sizes that two ranks do not share evenly, tied ends; with
    low-rank adapters if ADAPTERS is set.
    """
    torch.manual_seed(5)
    layers = {
        "embed": torch.nn.Embedding(11, 6), "up": torch.nn.Linear(6, 7), "norm": torch.nn.LayerNorm(7),
        "down": torch.nn.Linear(7, 6, bias=False), "head": torch.nn.Linear(6, 11, bias=False),
    }  # fmt: skip
    layers["head"].weight = layers["embed"].weight
    made = torch.nn.Sequential(OrderedDict(layers))
    if os.environ.get("ADAPTERS"):
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False), made)
    return made


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of a parameter."""
    return (
        parameter.to_local() if hasattr(parameter, "to_local") else getattr(parameter, "ds_tensor", parameter)
    )


def change(model: torch.nn.Module) -> None:
    """What an optimizer's step does to each rank's own part."""
    with torch.no_grad():
        for parameter in model.parameters():
            own_part(parameter).mul_(1.5)


def sharded(model: torch.nn.Module, how: str) -> torch.nn.Module:
    """Returns the model as one of two ranks has it."""
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils

        _init_utils._get_compute_device = lambda *_: torch.device("cpu")  # it compares it with cpu:0
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        return FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu"), device_mesh=mesh
        )
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed(dist_backend="gloo")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def assert_published(hook: Callable[..., Any], bridge: str, *ways: str) -> None:
    """Runs the hook on two ranks for each way to share a model, and compares what a reader gets.

    Args:
        hook: of the trainer: `hook(model, bridge, rank)` on each rank returns `publish(step)`.
        bridge: beginning of the bridges' names.
        ways: "ddp", "fsdp1", "fsdp2", "zero3".
    """
    from shmbridge.consumers.learner.model.lora import published_parameters
    from shmbridge.weights import WeightsReader

    readers = {way: WeightsReader(f"{bridge}-{way}") for way in ways}
    together = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    named = f"{hook.__module__}:{hook.__name__}"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", RANKS, named, bridge, *ways],
            cwd=ROOT, env=os.environ | together, capture_output=True, text=True, timeout=250,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-4000:]
        wanted = model()
        for _ in range(STEPS):
            change(wanted)
        whole = dict(published_parameters(wanted))
        state = wanted.state_dict() | whole
        for way, reader in readers.items():
            version, tensors = reader.copy()
            assert version == STEPS - 1
            assert set(whole) <= set(tensors)
            for name, tensor in tensors.items():
                got = torch.from_numpy(tensor)
                assert torch.equal(got, state[name]), (way, name, (got - state[name]).abs().max())
    finally:
        for reader in readers.values():
            reader.close()


def on_a_rank(hook: Callable[..., Any], bridge: str, rank: int, way: str) -> None:
    """Publishes the model after each change."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if way != "zero3":
        torch.distributed.init_process_group("gloo")
    whole = sharded(model(), way)
    if way != "ddp":
        held = sum(own_part(each).numel() for each in whole.parameters())
        assert held < 0.7 * sum(each.numel() for each in model().parameters()), "not sharded"
    publish = hook(whole, f"{bridge}-{way}", rank)
    for step in range(STEPS):
        change(whole)
        publish(step)
    torch.distributed.barrier()


def main(hook: str, bridge: str, *ways: str) -> None:
    """Runs the ranks of each way; exits with 1 if one failed."""
    module, name = hook.split(":")
    found = getattr(import_module(module), name)
    for way in ways:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(listening.getsockname()[1])
        ranks = []
        for rank in range(2):
            if (child := os.fork()) == 0:
                try:
                    on_a_rank(found, bridge, rank, way)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            ranks.append(child)
        if any(os.waitpid(child, 0)[1] for child in ranks):
            sys.exit(f"{way}: a rank failed")
