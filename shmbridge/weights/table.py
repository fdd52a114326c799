"""The table of a weights segment: name, type, shape and place of each tensor in every slot."""

import math
import operator
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from shmbridge._ext import weights as versions
from shmbridge._ext.weights import Versions
from shmbridge.errors import LayoutMismatch, WeightsMismatch
from shmbridge.segments import create_weights, open_mapping, weights_name

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


def open_segment(bridge: str) -> Versions | None:
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
