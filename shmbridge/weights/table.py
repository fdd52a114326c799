"""The weights segment and the table in it: name, type, shape and place of each tensor in every slot.

Also copies of tensors into and out of it.
"""

import math
import operator
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import msgspec
import numpy as np

from shmbridge._ext import weights as tensor_bytes
from shmbridge._ext import weights as versions
from shmbridge._ext.header import Control, Mapping
from shmbridge._ext.weights import Versions
from shmbridge.config import check_bridge_name
from shmbridge.errors import Closed, LayoutMismatch, WeightsMismatch
from shmbridge.segments import (
    OneProcess,
    at_exit,
    create_weights,
    leave_bridge,
    open_control,
    open_mapping,
    weights_name,
)


class WeightsEnd(OneProcess):
    """One end; a context manager.

    If its process dies, at any line, the end has left: the kernel drops its locks.
    """

    _called: ClassVar[str]  # in messages

    def __init__(self, bridge: str) -> None:
        self.bridge = check_bridge_name(bridge)
        self._control: Control | None = open_control(bridge)
        self._versions: Versions | None = None  # the segment that is mapped
        self._no_exit_call = at_exit(self.close)

    def _require_open(self) -> None:
        if self._control is None or self._control.mapping.forked:
            raise Closed(f"this {self._called} is closed, or belongs to the parent process")

    @property
    def memory(self) -> memoryview | None:
        """Returns the mapped weights segment, whole and read-only, to register it with a device; None before
        there is one.

        Never blocks.

        Another segment may replace it: at a first version, and when another model is published.
        BufferError in a child of fork.
        """
        self._require_open()
        return None if self._versions is None else memoryview(self._versions.mapping).toreadonly()

    @property
    def policy_version(self) -> int:
        """The bridge's published policy version; -1 before the first. Never blocks."""
        self._require_open()
        assert self._control is not None
        return int(self._control.policy_version)

    def __repr__(self) -> str:
        if self._control is None:
            state = "closed"
        elif self._control.mapping.forked:
            state = "of the process before fork"
        else:
            latest = self._versions.latest if self._versions is not None else None
            state = "no version yet" if latest is None else f"version {int(latest[0])}"
        return f"<{type(self).__name__} of {self.bridge!r}: {state}>"

    def _before_leaving(self) -> None:
        """Does an end's own work before it leaves."""
        self._versions = None

    def close(self) -> None:
        """Leaves; the last version stays readable while the bridge has a participant.

        Idempotent; does nothing in a child of fork.
        """
        if self._control is None or self._control.mapping.forked:
            return
        self._before_leaving()
        self._no_exit_call()
        control, self._control = self._control, None
        leave_bridge(control.mapping.fd, self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The numpy types that carry types numpy does not have.
_CARRIERS = {
    "bfloat16": "uint16",
    **dict.fromkeys(
        (
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        ),
        "uint8",
    ),
}
# Of numbers of a type: bytes, mask, value; one is NaN or infinite if (bits & mask) == value.
_BITS = {
    "float16": (2, 0x7C00, 0x7C00),
    "bfloat16": (2, 0x7F80, 0x7F80),
    **dict.fromkeys(("float32", "complex64"), (4, 0x7F80_0000, 0x7F80_0000)),
    **dict.fromkeys(("float64", "complex128"), (8, 0x7FF << 52, 0x7FF << 52)),
    "float8_e4m3fn": (1, 0x7F, 0x7F),
    "float8_e5m2": (1, 0x7C, 0x7C),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), (1, 0xFF, 0x80)),
    "float8_e8m0fnu": (1, 0xFF, 0xFF),
}
_PLAIN = frozenset(
    np.dtype(code).name for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
)
_LARGEST = 1 << 48
_ALIGNMENT = 64
_OVERWRITTEN = "something overwrote shared memory, or another build wrote it: publish them again"

Spec = tuple[str, str, Sequence[int]]  # name, dtype word, shape
Array = np.ndarray[Any, Any]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One row of the table: where a tensor lies in every slot.

    `dtype` is the learner's type name, such as bfloat16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


_rows = msgspec.json.Decoder(list[TensorSpec])


def carrier(dtype: str) -> np.dtype[Any]:
    """Returns the numpy type that carries values of this dtype word bit by bit: uint16 for bfloat16."""
    return np.dtype(_CARRIERS.get(dtype, dtype))


def number_bits(dtype: str) -> tuple[int, int, int] | None:
    """Returns (bytes, mask, value) by which numbers of this dtype word are looked at; None: nothing is to be
    looked at, or, for numpy's long doubles, nothing is.
    """
    return _BITS.get(dtype)


def as_specs(given: Iterable[Spec]) -> list[Spec]:
    """Returns (name, dtype word, shape of plain ints) of each spec. Raises WeightsMismatch for anything
    else.
    """
    if not isinstance(given, Iterable):
        raise _no_spec(given, "")
    specs: list[Spec] = []
    for each in given:
        try:
            name, dtype, shape = each
            specs.append((name, dtype, tuple(operator.index(size) for size in shape)))
        except (TypeError, ValueError) as wrong:
            raise _no_spec(each, f": {wrong}") from wrong
    return specs


def _no_spec(given: Any, why: str) -> WeightsMismatch:
    return WeightsMismatch(
        f"{given!r} is no (name, type word, shape){why}",
        hint='give triples as ("w", "bfloat16", (4096, 4096))',
    )


def lay_out(tensors: Iterable[Spec], bridge: str) -> tuple[list[TensorSpec], int]:
    """Returns the table of tensors with these names, dtypes and shapes, and the bytes of a slot. Raises
    WeightsMismatch for tensors that no reader could take.
    """
    table: list[TensorSpec] = []
    names: set[str] = set()
    at = 0
    for name, dtype, shape in tensors:
        shape = tuple(shape)
        word = dtype if isinstance(dtype, str) else repr(dtype)
        if (
            _CARRIERS.get(word, word) not in _PLAIN
            or len(shape) > 32
            or not all(0 <= size < _LARGEST for size in shape)
        ):
            raise WeightsMismatch(
                f"weights of bridge {bridge!r}: tensor {name!r} is {word}{list(shape)}, which no reader can "
                "take",
                hint='publish plain numbers; their type is a word, as "bfloat16"',
            )
        if not isinstance(name, str) or not name.isprintable():
            raise WeightsMismatch(
                f"weights of bridge {bridge!r}: {name!r} is no name of a tensor", hint="give printable text"
            )
        if name in names:
            raise WeightsMismatch(
                f"weights of bridge {bridge!r}: tensor {name!r} comes twice",
                hint="give every tensor one name",
            )
        names.add(name)
        size_bytes = math.prod(shape) * carrier(dtype).itemsize
        table.append(TensorSpec(name, dtype, shape, at, size_bytes))
        at += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
    return table, max(at, _ALIGNMENT)


def read_table(found: Versions, bridge: str) -> list[TensorSpec]:
    """Returns the table of a segment. Raises WeightsMismatch unless a writer of these names, dtypes and
    shapes would have written it.
    """
    try:
        table = _rows.decode(found.table)
    except (msgspec.MsgspecError, ValueError, RecursionError) as wrong:
        raise WeightsMismatch(
            f"the weights of bridge {bridge!r} have no table: {wrong}", hint=_OVERWRITTEN
        ) from None
    expected, slot_bytes = lay_out([(spec.name, spec.dtype, spec.shape) for spec in table], bridge)
    if table != expected or found.slot_bytes != slot_bytes or found.tensors != len(table):
        raise WeightsMismatch(
            f"the weights of bridge {bridge!r} do not lie where their table says", hint=_OVERWRITTEN
        )
    return table


def open_weights_segment(bridge: str) -> Versions | None:
    """Maps the bridge's present segment; None while there is none, or none that is complete.

    LayoutMismatch for another build's.
    """
    mapping = open_mapping(weights_name(bridge), minimum=versions.header_bytes)
    if mapping is None:
        return None
    found = Versions(mapping)
    if found.layout_version not in (0, versions.layout_version):
        raise LayoutMismatch(
            f"the weights of bridge {bridge!r} have layout version {found.layout_version}, this build has "
            f"{versions.layout_version}",
            hint="install the same shmbridge on both sides",
        )
    return found if found.ready else None


def segment_bytes(table: list[TensorSpec], slot_bytes: int) -> int:
    """Returns the bytes of a segment with this table."""
    return int(versions.data_place(len(msgspec.json.encode(table)), len(table)) + versions.slots * slot_bytes)


def create(table: list[TensorSpec], slot_bytes: int, bridge: str) -> Versions | None:
    """Returns a new segment of the bridge for this table, locked by its writer; None if there is one already.

    Blocks while memory is reserved.

    Raises ShmTooSmall.
    """
    mapping = create_weights(bridge, segment_bytes(table, slot_bytes))
    if mapping is None:
        return None
    made = Versions(mapping)
    made.format(os.getpid(), msgspec.json.encode(table), len(table), slot_bytes, secrets.randbits(64))
    return made


def difference(here: Sequence[TensorSpec], there: Sequence[Spec]) -> str:
    """Returns the first difference between the segment's table and the given tensors, by name; "" if there is
    none.
    """
    ours, theirs = {spec.name: spec for spec in here}, Counter(name for name, *_ in there)
    counts = f"{len(there)} tensors given, the segment has {len(here)}"
    if len(theirs) < len(there):
        return f"{counts}: {theirs.most_common(1)[0][0]!r} comes twice"
    missing = [spec.name for spec in here if spec.name not in theirs]
    unknown = [name for name, *_ in there if name not in ours]
    if missing or unknown:
        found = [f"{name!r} is not of them" for name in unknown[:1]] + [
            f"{name!r} is missing" for name in missing[:1]
        ]
        return f"{counts}: {', '.join(found)}"
    for name, dtype, shape in there:
        mine = ours[name]
        if (mine.dtype, mine.shape) != (dtype, tuple(shape)):
            return (
                f"tensor {name!r} {dtype}{list(shape)} was given, the segment has {name!r} "
                f"{mine.dtype}{list(mine.shape)}"
            )
    return ""


def not_finite(table: Sequence[TensorSpec], found: Versions, slot: int) -> str:
    """Returns which tensors of a slot have values that are not finite, in words; "" if none."""
    rows = np.flatnonzero(found.not_finite(slot))
    if not len(rows):
        return ""
    return f"{len(rows)} of {len(table)} tensors, first {table[int(rows[0])].name!r}"


def view(memory: memoryview, at: int, spec: TensorSpec) -> Array:
    """Returns a view of a tensor in the slot that begins at byte `at`."""
    return np.frombuffer(memory, carrier(spec.dtype), math.prod(spec.shape), at + spec.offset).reshape(
        spec.shape
    )


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
