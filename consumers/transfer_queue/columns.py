"""One field of a put as a column: the rows of a tensor one after the other, or packed objects.

Objects are what msgpack has, tensors, arrays and tuples; no pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch

from shmbridge.errors import InvalidRecord, RecordUnreadable

_ALIGNED = 64


class Placed(msgspec.Struct, array_like=True, frozen=True):
    """Where a column lies in its segment; written into the segment's table."""

    name: str
    dtype: str  # of its tensors; "" if its rows are objects
    shapes: list[list[int]]  # of the rows; one entry if all are the same
    sizes: list[int]  # bytes of each row's object
    at: int  # bytes from the start of the data


class Column:
    """A field of one put, checked, and its bytes: views of the caller's tensors where they are contiguous."""

    def __init__(self, name: str, given: Any, rows: int) -> None:
        """Copies nothing that is contiguous in main memory.

        Raises:
            InvalidRecord: it has another number of rows, or a row is of a type that cannot be carried.
        """
        self.name, self.dtype = name, ""
        self.shapes: list[list[int]] = []
        self.sizes: list[int] = []
        self.buffers: list[Any] = []
        self.is_nested = isinstance(given, torch.Tensor) and given.is_nested
        if isinstance(given, torch.Tensor) and (whole := _whole(given)) is not None:
            self._take_whole(whole, given, rows)
        else:
            each = list(given.unbind()) if isinstance(given, torch.Tensor) else [_bare(row) for row in given]
            self._require(len(each), rows)
            if _alike(each):
                self._take_tensors(each)
            else:
                self._take_objects(each)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def placed(self, at: int) -> Placed:
        """Returns what its segment's table says of it."""
        return Placed(self.name, self.dtype, self.shapes, self.sizes, at)

    def _take_whole(self, whole: torch.Tensor, given: torch.Tensor, rows: int) -> None:
        if self.is_nested:
            ends = _as_nested(given).offsets().tolist()
            self._require(len(ends) - 1, rows)
            rest = list(whole.shape[1:])
            whole = whole[ends[0] : ends[-1]]
            self.shapes = [[end - start, *rest] for start, end in pairwise(ends)]
        else:
            self._require(len(given), rows)
            self.shapes = [list(given.shape[1:])]
        self.dtype = _name(given.dtype)
        self.buffers = [self._bytes(whole, -1)]

    def _take_tensors(self, each: list[torch.Tensor]) -> None:
        self.dtype = _name(each[0].dtype)
        self.shapes = [list(row.shape) for row in each]
        self.buffers = [self._bytes(row, number) for number, row in enumerate(each)]

    def _take_objects(self, each: list[Any]) -> None:
        for number, row in enumerate(each):
            try:
                self.buffers.append(pack(row))
            except NotPlain as wrong:
                raise self._refused(number, wrong) from None
        self.sizes = [len(packed) for packed in self.buffers]

    def _bytes(self, tensor: torch.Tensor, row: int) -> Any:
        try:
            return tensor_bytes(tensor)
        except NotPlain as wrong:
            raise self._refused(row, wrong) from None

    def _refused(self, row: int, wrong: NotPlain) -> InvalidRecord:
        return InvalidRecord(
            f"field {self.name!r}{f', row {row}' if row >= 0 else ''}: {wrong} has no form without pickle",
            hint="put tensors, arrays, text, numbers, lists and dicts of these",
            column=self.name,
            row=row,
        )

    def _require(self, there: int, rows: int) -> None:
        if there != rows:
            raise InvalidRecord(
                f"field {self.name!r} has {there} rows, the put has {rows}",
                hint="put one value per row",
                column=self.name,
            )


class Stored:
    """A column in a mapped segment. Everything it gives out is a view of the mapping, or a new object."""

    def __init__(self, placed: Placed, data: torch.Tensor, rows: int) -> None:
        """Raises RecordUnreadable for a table that cannot be true.

        Args:
            placed: what the table says.
            data: uint8 (bytes,), the data of the segment.
            rows: of the segment.
        """
        self._placed, self._data = placed, data
        try:
            shapes = placed.shapes * rows if len(placed.shapes) == 1 else placed.shapes
            if self.is_tensor:
                self._dtype = dtype_of(placed.dtype)
                sizes = [prod(shape) * self._dtype.itemsize for shape in shapes]
            else:
                sizes = placed.sizes
            self._ends = list(accumulate(sizes, initial=placed.at))
            fits = (
                len(sizes) == rows
                and min(sizes, default=0) >= 0
                and 0 <= placed.at <= self._ends[-1] <= len(data)
            )
            if not fits:
                raise ValueError(
                    f"{len(sizes)} rows up to byte {self._ends[-1]} of {len(data)}, for {rows} rows"
                )
        except ValueError as wrong:
            raise RecordUnreadable(f"field {placed.name!r}: {wrong}", hint="put its rows again") from None
        self._shapes = shapes

    @property
    def is_tensor(self) -> bool:
        """Whether all rows are tensors of one type."""
        return bool(self._placed.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensors."""
        return self._dtype

    def shape(self, row: int) -> list[int]:
        """Of a row's tensor."""
        return self._shapes[row]

    def flat(self, first: int, last: int) -> torch.Tensor:
        """Returns the values of rows `first` to `last` - 1, one after the other: a view (values,)."""
        return self._data[self._ends[first] : self._ends[last]].view(self._dtype)

    def value(self, row: int) -> Any:
        """Returns a row: a view of its tensor, or its object."""
        if self.is_tensor:
            return self.flat(row, row + 1).view(self._shapes[row])
        packed = self._data[self._ends[row] : self._ends[row + 1]].numpy()
        try:
            return unpack(packed.data)
        except (msgspec.MsgspecError, ValueError, TypeError) as wrong:
            raise RecordUnreadable(
                f"field {self._placed.name!r}, row {row}: {wrong}", hint="put its row again"
            ) from wrong


def place(columns: Sequence[Column]) -> tuple[list[Placed], list[tuple[int, list[Any]]]]:
    """Returns where each column lies, and its buffers; columns begin at multiples of 64 bytes."""
    placed, parts, at = [], [], 0
    for column in columns:
        placed.append(column.placed(at))
        parts.append((at, column.buffers))
        at += (column.size + _ALIGNED - 1) & -_ALIGNED
    return placed, parts


def _whole(given: torch.Tensor) -> torch.Tensor | None:
    """Returns the rows in one tensor, one after the other; None if they do not lie so."""
    if not given.is_nested:
        return given
    jagged = given.layout == torch.jagged and _as_nested(given).lengths() is None
    # the second dimension is the ragged one: torch shows its length as a symbol
    return given.values() if jagged and not isinstance(given.shape[1], int) else None


def _as_nested(tensor: torch.Tensor) -> Any:
    """torch's stubs know no methods of nested tensors."""
    return tensor


def _alike(rows: list[Any]) -> bool:
    return bool(rows) and all(isinstance(row, torch.Tensor) and row.dtype == rows[0].dtype for row in rows)


def _bare(row: Any) -> Any:
    """Returns what tensordict wraps in NonTensorData."""
    wraps = type(row).__name__ == "NonTensorData"
    return row.data if wraps else row


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_TENSOR, _ARRAY, _SCALAR, _TUPLE = 1, 2, 3, 4
_LIMITS = (-(1 << 63), (1 << 64) - 1)  # of msgpack's whole numbers
_encode = msgspec.msgpack.Encoder().encode


class NotPlain(TypeError):
    """A value, or something in it, is of a type that has no bytes of its own."""


def pack(value: Any) -> bytes:
    """Returns the bytes of a value; raises NotPlain, which names the type."""
    return _encode(_plain(value))


def unpack(packed: bytes | memoryview) -> Any:
    """Returns the value; tensors and arrays own their memory."""
    return _decoder.decode(packed)


def _plain(value: Any) -> Any:
    """Returns what msgpack writes; subclasses of its types are refused, as they would not come back."""
    kind = type(value)
    if kind is int and not _LIMITS[0] <= value <= _LIMITS[1]:
        raise NotPlain(f"a whole number of {value.bit_length()} bits")
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind is list:
        return [_plain(each) for each in value]
    if kind is dict:
        for key in value:
            if type(key) not in (str, int, bool, bytes):
                raise NotPlain(f"a dict with a key of type {type(key).__qualname__}")
        return {key: _plain(each) for key, each in value.items()}
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, _encode([_plain(each) for each in value]))
    if isinstance(value, torch.Tensor):
        raw = tensor_bytes(value)
        head = [str(value.dtype).removeprefix("torch."), list(value.shape), raw.tobytes()]
        return msgspec.msgpack.Ext(_TENSOR, _encode(head))
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.kind != "V":
        head = [value.dtype.str, list(value.shape), value.tobytes()]
        return msgspec.msgpack.Ext(_ARRAY, _encode(head))
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.kind != "V":
        return msgspec.msgpack.Ext(_SCALAR, _encode([value.dtype.str, value.tobytes()]))
    raise NotPlain(f"a {kind.__module__}.{kind.__qualname__}")


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the values in row-major order as uint8 (bytes,): a view if they lie so in main memory.

    Raises NotPlain for sparse, nested and quantized tensors.
    """
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise NotPlain(f"a {'quantized' if tensor.is_quantized else tensor.layout} tensor")
    there = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw: np.ndarray[Any, np.dtype[np.uint8]] = there.reshape(-1).view(torch.uint8).numpy()
    return raw


def dtype_of(name: str) -> torch.dtype:
    """Returns torch.float32 for "float32"; raises ValueError if there is no such type."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return dtype


def _unpack_ext(code: int, packed: memoryview) -> Any:
    found = _decoder.decode(packed)
    if code == _TUPLE:
        return tuple(found)
    if code == _TENSOR:
        name, shape, raw = found
        dtype = dtype_of(name)
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    if code == _ARRAY:
        name, shape, raw = found
        return np.frombuffer(bytearray(raw), np.dtype(name)).reshape(shape)
    if code == _SCALAR:
        name, raw = found
        return np.ndarray((), np.dtype(name), raw or b"\0")[()]  # text may have no bytes
    raise ValueError(f"extension {code} is unknown")


_decoder = msgspec.msgpack.Decoder(ext_hook=_unpack_ext, strict=True)
