"""How the ranks share one model: every rank has all of it (DDP), or a part of each tensor (FSDP2), or there
is one.

Knows torch's wrappers, and nothing of losses, batches or files. Called by `grpo_update.py`, `publishing.py`
and `checkpoint.py`.
"""

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
Index = tuple[slice, ...]  # where a part lies in a whole tensor


class Parallel:
    """A model that one process has for itself.

    Args:
        model: any module.
    """

    world: World = ALONE

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, compute: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Returns `compute(model, *args, **named)`; whatever needs the model's gradient goes through here."""
        return compute(self.model, *args, **named)

    def read(self, compute: Callable[..., Result], *args: Any) -> Result:
        """Returns `compute(model, *args)`, which may call the model as often as it likes, and takes no
        gradient.

        Every rank calls it.
        """
        return compute(self.model, *args)

    def rounds(self, micros: Iterable[Micro]) -> Iterator[Micro | None]:
        """Yields this rank's micro-batches, then None as often as other ranks have more: take part in those,
        too.

        Run the forward and the backward of each before the next. One may be taken ahead.
        """
        return iter(micros)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's share of a loss that is a sum over all ranks."""
        loss.backward()


class _Through(nn.Module):
    """A module whose forward is any function of the model: wrappers see one forward, whatever it calls of the
    model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Result], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return _owned(compute(self.model, *args, **named))


def _owned(result: Any) -> Any:
    """The result with tensors of its own: FSDP2 hooks into them, and cannot into views of others."""
    if isinstance(result, tuple):
        return tuple(_owned(each) for each in result)
    return result.clone() if isinstance(result, Tensor) else result


def _with_all_experts(module: nn.Module, args: Any, output: Any) -> Any:
    """The output as it is, with a gradient of 0 for the experts that no token of this rank went to.

    A parameter without a gradient on one rank is one that DDP waits for, and in whose place FSDP2 adds up
    another's.
    """
    first, *rest = output if isinstance(output, tuple) else (output,)
    trained = [each for each in module.parameters() if each.requires_grad]
    if not (trained and torch.is_grad_enabled()):
        return output
    nothing = torch.stack([each.flatten()[0].float() for each in trained]).sum() * 0.0
    first = first + nothing.to(first.dtype)
    return (first, *rest) if isinstance(output, tuple) else first


class _Wrapped(Parallel):
    """What the two ways have in common: both average gradients over the ranks, where a sum is wanted."""

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model)
        self.world = world
        for module in model.modules():
            if isinstance(getattr(module, "experts", None), nn.ModuleList):
                module.register_forward_hook(_with_all_experts)
        self._whole: nn.Module = _Through(model)

    def __call__(self, compute: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Returns `compute(model, *args, **named)`; whatever needs the model's gradient goes through here."""
        result: Result = self._whole(compute, args, named)
        return result

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's share of a loss that is a sum over all ranks."""
        (loss * self.world.size).backward()

    def _any(self, own: object | None) -> bool:
        """Whether any rank has something."""
        return bool(self.world.all_reduce_max(np.array([own is not None], np.float64))[0])


class Replicated(_Wrapped):
    """Every rank has the model whole; gradients are exchanged in the last backward of a batch (DDP)."""

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model, world)
        wrapper: Any = nn.parallel.DistributedDataParallel
        # Buffers are the same everywhere; an exchange in each forward would want as many forwards of every
        # rank.
        known = inspect.signature(wrapper.__init__).parameters  # older releases of torch have the older name
        exchange_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        self._ddp = wrapper(self._whole, **{exchange_buffers: False})
        self._whole = self._ddp

    def rounds(self, micros: Iterable[Micro]) -> Iterator[Micro | None]:
        """Yields all micro-batches but the last without an exchange; each rank has one with it, of its own or
        None.
        """
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
    """Every rank has a part of each tensor, and they come together block by block for each forward
    (FSDP2).
    """

    def __init__(self, model: nn.Module, world: World, device: torch.device) -> None:
        super().__init__(model, world)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (world.size,))
        for block in list(blocks(model)):
            fully_shard(block, mesh=mesh)
        fully_shard(self._whole, mesh=mesh)

    def read(self, compute: Callable[..., Result], *args: Any) -> Result:
        """Returns `compute(model, *args)`; what lies outside of the blocks is whole meanwhile, on every rank.

        It must not raise.
        """
        result: Result = self._whole(compute, args, {})
        self._whole.reshard()  # type: ignore[operator]  # which FSDP2 leaves to a backward pass
        return result

    def rounds(self, micros: Iterable[Micro]) -> Iterator[Micro | None]:
        """Yields as often on every rank, None where this one has no micro-batch left: each forward takes all
        ranks.
        """
        coming = iter(micros)
        while self._any(micro := next(coming, None)):
            yield micro


def parallel_of(model: nn.Module, how: str, world: World, device: torch.device) -> Parallel:
    """Returns the form in which the ranks share a model, "ddp" or "fsdp2".

    Make the optimizer after it; blocks for all ranks.
    """
    if world.size == 1:
        return Parallel(model)
    return Sharded(model, world, device) if how == "fsdp2" else Replicated(model, world)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers that a Hugging Face model names as those to be kept in one piece; none for other
    modules.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    return (module for module in model.modules() if type(module).__name__ in names)


def is_sharded(model: nn.Module) -> bool:
    """Returns whether ranks have parts of the model's tensors, so that all of them are needed for the
    whole.
    """
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor, on every rank; blocks for the others if it is a sharded one."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def own_part(tensor: Tensor) -> tuple[Tensor, Index | None]:
    """Returns the part of a tensor that this rank has, and where in the whole it lies; None: this is all of
    it, as on every rank.

    Never blocks, but for the other ranks where a tensor is split in a way that FSDP2 does not: it is whole
    then.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor, None
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    ways, local, mesh = tensor.placements, tensor.to_local(), tensor.device_mesh
    if len(ways) != 1 or type(ways[0]) is not Shard:
        return whole(tensor), None
    dimension = ways[0].dim
    size = -(-tensor.shape[dimension] // mesh.size())  # as torch.chunk: the last ones are shorter, or empty
    at = min(size * mesh.get_local_rank(), tensor.shape[dimension])
    assert local.shape[dimension] == min(size, tensor.shape[dimension] - at), (
        f"{tuple(local.shape)} of {tuple(tensor.shape)}"
    )
    return local, (*(slice(None),) * dimension, slice(at, at + local.shape[dimension]))


def shared_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns the part of a whole tensor, the same on all ranks, that a rank holds of a parameter."""
    value = value.to(parameter.device)
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def gathered(tensor: Tensor, write: bool) -> Tensor | None:
    """Returns all of a tensor where it is written, which is rank 0, and None on the others; blocks for them
    if it is a sharded one.

    A sharded one comes to the CPU; the device of rank 0 has this one whole meanwhile, those of the others no
    more than their part.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor.cpu() if write else None
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    ways, mesh = tensor.placements, tensor.device_mesh
    if len(ways) != 1 or type(ways[0]) is not Shard:  # split in a way that FSDP2 does not
        full = whole(tensor)
        return full.cpu() if write else None
    dimension, count = ways[0].dim, tensor.shape[ways[0].dim]
    local = tensor.to_local().movedim(dimension, 0)
    # as torch.chunk: the last ones are shorter, or empty
    part = local.new_zeros((-(-count // mesh.size()), *local.shape[1:]))
    part[: len(local)] = local
    parts = [torch.empty_like(part) for _ in range(mesh.size())] if write else None
    distributed.gather(part, parts, dst=0, group=mesh.get_group())
    if parts is None:
        return None
    return torch.cat([each.cpu() for each in parts])[:count].movedim(0, dimension).contiguous()


def whole_state(model: Any, write: bool = True) -> dict[str, Tensor]:
    """Returns the whole tensors of a sharded model's state by name, on the CPU; tied ones are one tensor.

    Empty if nothing is sharded.

    Blocks for the other ranks: every rank calls it, and gets an empty one unless it is the one that writes,
    rank 0.
    """
    if not is_sharded(model):
        return {}
    state = model.state_dict(keep_vars=True)
    one_of = {id(tensor): tensor for tensor in state.values()}
    wholes = {key: gathered(tensor.detach(), write) for key, tensor in one_of.items()}
    found = {name: wholes[id(tensor)] for name, tensor in state.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
