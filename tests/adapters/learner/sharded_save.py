"""Run once per rank: what a checkpoint of a sharded model takes of each rank's memory, and that the file is
the whole.
"""

from __future__ import annotations

import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sharded_forward import model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Progress
from shmbridge.consumers.learner.model.optimizer import new_optimizer
from shmbridge.consumers.learner.model.sharding import parallel_of
from shmbridge.consumers.learner.world import TorchWorld


class Allocated(TorchDispatchMode):
    """Adds up the storages that operators make and that live, and keeps the most that there was."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if type(each) is torch.Tensor
        }
        for each in tree_leaves(out):
            if (
                type(each) is not torch.Tensor
                or (key := each.untyped_storage()._cdata) in given
                or key in self._seen
            ):
                continue
            size = each.untyped_storage().nbytes()
            self._seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(each.untyped_storage(), self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def main() -> None:
    """Train a step, save, compare; print the bytes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = TorchWorld(rank, 2, rank, 2, timedelta(seconds=60))
    own = model(tied=len(sys.argv) > 2)
    expected = {name: each.detach().clone() for name, each in own.named_parameters()}
    parallel = parallel_of(own, "fsdp2", world, torch.device("cpu"))
    optimizer = new_optimizer(own.parameters(), 0.0)
    loss = parallel(lambda it: it(input_ids=torch.arange(12)[None], use_cache=False).logits.square().mean())
    parallel.backward(loss)
    optimizer.step()  # of learning rate 0: the parameters stay
    shard = sum(
        each.to_local().nbytes
        for state in optimizer.state.values()
        for each in state.values()
        if hasattr(each, "to_local")
    )
    largest = max(each.nbytes for each in expected.values())
    folder = Path(sys.argv[1])
    with Allocated() as allocated:
        path = checkpoint.save(folder, Progress(1, 1), own, None, optimizer, write=rank == 0)
    dist.barrier()
    print(
        f"rank {rank}: shard {shard}, largest tensor {largest}, most beside them while saving "
        f"{allocated.most}",
        flush=True,
    )
    assert shard > 4 * largest
    if rank:
        assert allocated.most <= 2 * largest, "a rank that writes nothing gathers"
    else:
        saved = load_file(path / "model.safetensors")
        assert all(torch.equal(saved[name], each) for name, each in expected.items() if name in saved)
        moments = load_file(path / "optimizer.safetensors")
        for name, each in expected.items():
            assert moments[f"exp_avg.{name}"].shape == each.shape
            assert moments[f"exp_avg_sq.{name}"].count_nonzero()
    for name, parameter in own.named_parameters():
        whole = optimizer.state[parameter]["exp_avg"].full_tensor()
        if rank == 0:
            assert torch.equal(moments[f"exp_avg.{name}"], whole), name
    print("equal: saved", flush=True)
    world.leave()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
