"""How ranks share one model: each has all of it (DDP), or a shard of each tensor (FSDP2)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shmbridge.consumers.learner.world import ALONE, World

Micro = TypeVar("Micro")
Result = TypeVar("Result")
Index = tuple[slice, ...]  # position of a shard in the whole tensor


class Parallel:
    """The model of a single process."""

    world: World = ALONE

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, compute: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Returns `compute(model, *args, **named)`. All that needs the model's gradient goes through here."""
        return compute(self.model, *args, **named)

    def read(self, compute: Callable[..., Result], *args: Any) -> Result:
        """Returns `compute(model, *args)`, which may call the model any number of times, without gradients.

        Every rank calls it.
        """
        return compute(self.model, *args)

    def rounds(self, micros: Iterable[Micro]) -> Iterator[Micro | None]:
        """Yields this rank's micro-batches, then None for each further one of other ranks.

        Take part in those, too: a forward and a backward before the next. One may be taken ahead.
        """
        return iter(micros)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's share of a loss that is summed over all ranks."""
        loss.backward()


class _Through(nn.Module):
    """A module whose forward is any function of the model, so that wrappers see a single forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Result], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return _owned(compute(self.model, *args, **named))


def _owned(result: Any) -> Any:
    """Returns the result with views copied: FSDP2 hooks into tensors, and cannot hook into views."""
    if isinstance(result, tuple):
        return tuple(_owned(each) for each in result)
    return result.clone() if isinstance(result, Tensor) else result


def _with_all_experts(module: nn.Module, args: Any, output: Any) -> Any:
    """Returns the output, with a gradient of 0 for experts that got no token on this rank.

    Without one on some rank, DDP waits for it, and FSDP2 adds another parameter's in its place.
    """
    first, *rest = output if isinstance(output, tuple) else (output,)
    trained = [each for each in module.parameters() if each.requires_grad]
    if not (trained and torch.is_grad_enabled()):
        return output
    nothing = torch.stack([each.flatten()[0].float() for each in trained]).sum() * 0.0
    first = first + nothing.to(first.dtype)
    return (first, *rest) if isinstance(output, tuple) else first


class _Wrapped(Parallel):
    """The common part of DDP and FSDP2: both average gradients over the ranks, but a sum is needed."""

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model)
        self.world = world
        for module in model.modules():
            if isinstance(getattr(module, "experts", None), nn.ModuleList):
                module.register_forward_hook(_with_all_experts)
        self._whole: nn.Module = _Through(model)

    def __call__(self, compute: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Returns `compute(model, *args, **named)`. All that needs the model's gradient goes through here."""
        result: Result = self._whole(compute, args, named)
        return result

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's share of a loss that is summed over all ranks."""
        (loss * self.world.size).backward()

    def _any(self, own: object | None) -> bool:
        """Returns whether any rank has a true value."""
        return bool(self.world.all_reduce_max(np.array([own is not None], np.float64))[0])


class Replicated(_Wrapped):
    """Every rank has the whole model; gradients are reduced in the last backward of a batch (DDP)."""

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model, world)
        wrapper: Any = nn.parallel.DistributedDataParallel
        # Buffers are equal on all ranks; broadcasting them in each forward would need equally many forwards
        # on every rank.
        known = inspect.signature(wrapper.__init__).parameters  # older torch releases use the old name
        exchange_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        self._ddp = wrapper(self._whole, **{exchange_buffers: False})
        self._whole = self._ddp

    def rounds(self, micros: Iterable[Micro]) -> Iterator[Micro | None]:
        """Yields all but the last without gradient reduction; each rank reduces in its last, or in None."""
        coming = iter(micros)
        micro = next(coming, None)
        if not self._any(micro):
            return
        while (following := next(coming, None)) is not None:
            with self._ddp.no_sync():
                yield micro
            micro = following
        yield micro


class Sharded(_Wrapped):
    """Every rank has a shard of each tensor; blocks are gathered one by one in each forward (FSDP2)."""

    def __init__(self, model: nn.Module, world: World, device: torch.device) -> None:
        super().__init__(model, world)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (world.size,))
        for block in list(blocks(model)):
            fully_shard(block, mesh=mesh)
        fully_shard(self._whole, mesh=mesh)

    def read(self, compute: Callable[..., Result], *args: Any) -> Result:
        """Returns `compute(model, *args)`, with parameters outside the blocks gathered. It must not raise."""
        result: Result = self._whole(compute, args, {})
        self._whole.reshard()  # type: ignore[operator] # FSDP2 reshards only in a backward pass
        return result

    def rounds(self, micros: Iterable[Micro]) -> Iterator[Micro | None]:
        """Yields equally often on every rank, as each forward is collective; None where there is no more."""
        coming = iter(micros)
        while self._any(micro := next(coming, None)):
            yield micro


def parallel_of(model: nn.Module, how: str, world: World, device: torch.device) -> Parallel:
    """Wraps a model, before its optimizer, for several ranks: "ddp" or "fsdp2". Blocks for all ranks."""
    if world.size == 1:
        return Parallel(model)
    return Sharded(model, world, device) if how == "fsdp2" else Replicated(model, world)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers that a Hugging Face model marks as not to be split; none for other modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return (module for module in model.modules() if type(module).__name__ in names)


def is_sharded(model: nn.Module) -> bool:
    """Returns whether the model's tensors are sharded over the ranks."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole tensor on every rank; blocks for the others if it is sharded."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def own_part(tensor: Tensor) -> tuple[Tensor, Index | None]:
    """Returns this rank's shard of a tensor and its place in the whole; None: every rank has the whole.

    Blocks for the other ranks only if a tensor is sharded as FSDP2 does not: then it is gathered.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor, None
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    ways, local, mesh = tensor.placements, tensor.to_local(), tensor.device_mesh
    if len(ways) != 1 or type(ways[0]) is not Shard:
        return whole(tensor), None
    dimension = ways[0].dim
    size = -(-tensor.shape[dimension] // mesh.size())  # as torch.chunk: the last shards are shorter, or empty
    at = min(size * mesh.get_local_rank(), tensor.shape[dimension])
    assert local.shape[dimension] == min(size, tensor.shape[dimension] - at), (
        f"{tuple(local.shape)} of {tuple(tensor.shape)}"
    )
    return local, (*(slice(None),) * dimension, slice(at, at + local.shape[dimension]))


def shared_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns the shard of a whole tensor that corresponds to this rank's shard of a parameter."""
    value = value.to(parameter.device)
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def gathered(tensor: Tensor, write: bool) -> Tensor | None:
    """Returns the whole tensor on rank 0, and None on the others; blocks for them if it is sharded.

    The result is on the CPU. In between, rank 0's device holds it whole, the others only their shard.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor.cpu() if write else None
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    ways, mesh = tensor.placements, tensor.device_mesh
    if len(ways) != 1 or type(ways[0]) is not Shard:  # sharded in a way that FSDP2 does not use
        full = whole(tensor)
        return full.cpu() if write else None
    dimension, count = ways[0].dim, tensor.shape[ways[0].dim]
    local = tensor.to_local().movedim(dimension, 0)
    # as torch.chunk: the last shards are shorter, or empty
    part = local.new_zeros((-(-count // mesh.size()), *local.shape[1:]))
    part[: len(local)] = local
    parts = [torch.empty_like(part) for _ in range(mesh.size())] if write else None
    distributed.gather(part, parts, dst=0, group=mesh.get_group())
    if parts is None:
        return None
    return torch.cat([each.cpu() for each in parts])[:count].movedim(0, dimension).contiguous()


def whole_state(model: Any, write: bool = True) -> dict[str, Tensor]:
    """Returns a sharded model's state by name, on the CPU; empty if nothing is sharded.

    Collective: every rank calls it and blocks for the others. All but rank 0 get an empty result. Tied
    parameters share a tensor.
    """
    if not is_sharded(model):
        return {}
    state = model.state_dict(keep_vars=True)
    one_of = {id(tensor): tensor for tensor in state.values()}
    wholes = {key: gathered(tensor.detach(), write) for key, tensor in one_of.items()}
    found = {name: wholes[id(tensor)] for name, tensor in state.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
