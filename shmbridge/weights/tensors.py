"""Copies the values of a tensor into a slot: numpy or torch, host or device, whole or a shard."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from shmbridge._ext import weights as tensor_bytes
from shmbridge._ext.header import Mapping
from shmbridge.errors import WeightsMismatch
from shmbridge.weights.table import Array, TensorSpec, number_bits, view

Index = tuple[slice, ...]
# Signed, since older torch has no unsigned 16-, 32- and 64-bit integers.
_SAME_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def pairs(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) of each as it comes. Raises WeightsMismatch for anything else, such as a model,
    or a dict without `.items()`.
    """
    try:
        given = iter(tensors)
    except TypeError:
        raise _no_pairs(tensors) from None
    for each in given:
        if not isinstance(each, (tuple, list)) or len(each) != 2 or not isinstance(each[0], str):
            raise _no_pairs(each)
        yield each[0], each[1]


def _no_pairs(given: Any) -> WeightsMismatch:
    told = repr(given)[:80] if isinstance(given, (str, tuple)) else type(given).__name__
    return WeightsMismatch(
        f"{told} was given for a (name, tensor) pair",
        hint="give pairs, as model.state_dict().items() has them",
    )


def is_torch(tensor: Any) -> bool:
    """Returns whether it is a torch tensor; imports nothing, since a tensor exists only if torch is
    imported.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def as_source(name: str, tensor: Any) -> Any:
    """Returns a torch tensor as it is, anything else as an ndarray of this machine's byte order.

    Raises WeightsMismatch for a shard of a DTensor, for an array with masked values, and for tensors whose
    values are not in one piece of memory: sparse, nested, "meta", not initialised.
    """
    if is_torch(tensor):
        import torch

        if (
            torch.nn.parameter.is_lazy(tensor)
            or tensor.is_nested
            or tensor.is_meta
            or tensor.layout is not torch.strided
        ):
            raise WeightsMismatch(
                f"tensor {name!r} ({type(tensor).__name__}, {tensor.layout}, {tensor.device}) has no values "
                "in one piece of memory",
                hint="publish dense tensors, of a model that is loaded",
            )
        if hasattr(tensor, "full_tensor"):
            raise WeightsMismatch(
                f"tensor {name!r} is a DTensor {list(tensor.shape)}, of which this process has a part",
                hint="write each rank's part: fill(), and WeightsPart.write(..., tensor.to_local(), index)",
            )
        return tensor
    try:
        array = np.asarray(tensor)
    except (TypeError, ValueError) as wrong:
        raise WeightsMismatch(
            f"tensor {name!r} ({type(tensor).__name__}) is no array: {wrong}", hint="publish plain numbers"
        ) from wrong
    if isinstance(tensor, np.ma.MaskedArray) and (masked := int(np.ma.getmaskarray(tensor).sum())):
        raise WeightsMismatch(
            f"tensor {name!r} is a masked array, and {masked} of its {tensor.size} values are masked",
            hint="publish tensor.filled(0)",
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def on_host(name: str, tensor: Any) -> Any:
    """As `as_source`, but copies a device tensor to the host, so that its device memory is not kept."""
    source = as_source(name, tensor)
    return source.detach().cpu() if is_torch(source) else source


def kind(source: Any) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype word and shape of a source from `as_source`."""
    word = str(source.dtype).removeprefix("torch.") if is_torch(source) else source.dtype.name
    return word, tuple(source.shape)


def write(
    mapping: Mapping, at: int, spec: TensorSpec, source: Any, index: Index | None = None, *, going_round: int
) -> tuple[int, bool]:
    """Copies a source to the place of `spec` in the slot at byte `at`, or to the shard that `index` names;
    returns the bytes written, and whether all values are finite.

    Blocks for the copy, and for a device's. Raises WeightsMismatch if type or shape differ.
    """
    number = number_bits(spec.dtype)
    if index is None:
        _require(spec, spec.shape, source, "")
        flat = _flat(source) if spec.size_bytes else None
        if flat is not None:
            return spec.size_bytes, tensor_bytes.copy_in(mapping, at + spec.offset, flat, going_round, number)
    place = view(memoryview(mapping), at, spec)
    if index is not None:
        place = _part(place, spec, index)
        _require(
            spec, place.shape, source, f", the part {_told(index)} of it is {spec.dtype}{list(place.shape)}"
        )
    if place.size == 0:
        return 0, True
    flat = _flat(source) if place.flags.c_contiguous else None
    if flat is not None:
        begin = place.ctypes.data - mapping.address
        return int(place.nbytes), tensor_bytes.copy_in(mapping, begin, flat, going_round, number)
    if is_torch(source):
        import torch

        torch.from_numpy(place.view(_SAME_SIZE[place.itemsize])).view(source.dtype).copy_(source.detach())
    else:
        np.copyto(place, source, casting="equiv" if source.dtype == place.dtype else "unsafe")
    return int(place.nbytes), number is None or _is_finite(source, place, number)


def _is_finite(source: Any, place: Array, number: tuple[int, int, int]) -> bool:
    """Returns whether a source that is not in one piece on the host is finite; its copy is at `place`."""
    if is_torch(source) and source.device.type != "cpu" and source.is_floating_point() and number[0] > 1:
        import torch

        return math.isfinite(
            source.detach().sum(dtype=torch.float64).item()
        )  # on its device, which is faster
    return tensor_bytes.are_finite(np.ascontiguousarray(place).reshape(-1).view(np.uint8), number)


def _require(spec: TensorSpec, shape: tuple[int, ...], source: Any, part: str) -> None:
    given = kind(source)
    if given != (spec.dtype, shape):
        word, has = given
        raise WeightsMismatch(
            f"tensor {spec.name!r} {word}{list(has)} was given, the segment has "
            f"{spec.dtype}{list(spec.shape)}{part}",
            hint="give the index of the part that is written"
            if part
            else "one bridge carries one model: use another bridge",
        )


def _part(place: Array, spec: TensorSpec, index: Sequence[Any]) -> Array:
    if (
        not isinstance(index, tuple)
        or len(index) > place.ndim
        or not all(isinstance(each, slice) for each in index)
    ):
        raise _no_part(spec, index)
    try:
        part: Array = place[(*index, ...)]  # a view, also of a 0-dimensional tensor
    except (TypeError, ValueError) as wrong:
        raise _no_part(spec, index) from wrong
    if any(stride < 0 for stride in part.strides):
        raise _no_part(spec, index)
    return part


def _no_part(spec: TensorSpec, index: Any) -> WeightsMismatch:
    return WeightsMismatch(
        f"no part of tensor {spec.name!r} {list(spec.shape)} is {index!r}",
        hint="give a tuple of slices that go up, one per dimension",
    )


def _told(index: Index) -> str:
    steps = (f":{each.step}" if each.step is not None else "" for each in index)
    bounds = (
        f"{'' if each.start is None else each.start}:{'' if each.stop is None else each.stop}"
        for each in index
    )
    return f"[{', '.join(bound + step for bound, step in zip(bounds, steps, strict=True))}]"


def _flat(source: Any) -> Array | None:
    """Returns the bytes of a source without a copy; None if they are not in one piece on the host."""
    if is_torch(source):
        if source.device.type != "cpu" or not source.is_contiguous() or source.is_neg() or source.is_conj():
            return None
        import torch

        flat: Array = source.detach().reshape(-1).view(torch.uint8).numpy()
        return flat
    return source.reshape(-1).view(np.uint8) if source.flags.c_contiguous else None
