"""How an error shows what a caller gave: one line, short, without the words of a library's repr."""

import reprlib
import sys
from typing import Any


class _Short(reprlib.Repr):
    """Python's own short repr, in which all but plain values stand by their kind."""

    def repr_instance(self, x: Any, level: int) -> str:
        """Returns a NumPy number as written; else what the value is."""
        plain = _as_python(x)
        return repr(plain)[:40] if isinstance(plain, _PLAIN) else kind_of(x)

    def repr_int(self, x: int, level: int) -> str:
        """Returns an int, also one with more digits than Python writes."""
        return super().repr_int(x, level) if x.bit_length() < 10_000 else "a number of thousands of digits"

    def repr_Written(self, x: Any, level: int) -> str:
        """Returns a value of a YAML file (`wrong_value.Written`) as it is written there."""
        return repr(x)


_short = _Short()
_short.maxlist = _short.maxtuple = _short.maxarray = 4
_short.maxdict = _short.maxset = _short.maxlevel = 2
_short.maxstring = _short.maxother = 40
_short.maxlong = 24
_PLAIN = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, type(None))
_NAMES = {
    "NoneType": "None",
    "ndarray": "array",
    "function": "function",
    "builtin_function_or_method": "function",
}


def counted(number: int, thing: str) -> str:
    """Returns "1 row", "2 rows"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def kind_of(value: object) -> str:
    """Returns what a value is, with its article: "a list", "an int", "None"."""
    if isinstance(value, (str, bytes)):
        return "text" if isinstance(value, str) else "bytes"
    name = type(_as_python(value)).__name__
    name = _NAMES.get(name, name)
    if name == "None":
        return name
    library = type(value).__module__.split(".")[0]
    if library in ("pandas", "polars", "pyarrow", "datasets") and name != "Array":
        name = f"{library} {name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_tensor(value: object) -> bool:
    """Returns whether it is a torch tensor; imports nothing."""
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def shown(value: Any) -> str:
    """Returns a value as an error shows it: a number or text as written, cut if long; else what it is."""
    value = _as_python(value)
    if is_dtype(value):
        return f"an array of {_dtype_name(value)}"
    if is_tensor(value) and value.is_nested:  # has no shape
        return "a nested tensor"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array_shown(value)
    if not isinstance(value, _PLAIN):
        return kind_of(value)
    return " ".join(_short.repr(value).split())


def _as_python(value: Any) -> Any:
    """Returns NumPy's numbers as Python's."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
        return value.item()
    return value


def is_dtype(value: object) -> bool:
    """Returns whether it is a NumPy dtype."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.dtype)


def _dtype_name(dtype: Any) -> str:
    return {"O": "Python objects", "U": "texts", "S": "bytes", "M": "dates"}.get(dtype.kind, str(dtype))


def _array_shown(value: Any) -> str:
    kind = "tensor" if is_tensor(value) else "array"
    try:
        shape = tuple(int(size) for size in value.shape)
        if shape == () and str(getattr(value, "device", "cpu")) == "cpu":
            return f"a single number, {shown(value.item())}"
    except (TypeError, ValueError, RuntimeError):
        return kind_of(value)
    return f"{'a' if kind == 'tensor' else 'an'} {kind} of shape {shape}"
