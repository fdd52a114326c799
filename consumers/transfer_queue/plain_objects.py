"""Values that are no tensors, to bytes and back: what msgpack has, tensors, arrays and tuples; no pickle."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

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
