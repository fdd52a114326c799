"""One option of the learner: its type, its default and its help, read off a field of a section."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from shmbridge.config import check_bridge_name, plain, shown_value

_LARGEST = sys.float_info.max

# Kinds of numbers. Errors say that a value is not <description>.
Positive = Annotated[int, Meta(ge=1, description="a whole number above 0")]
NotNegative = Annotated[int, Meta(ge=0, description="a whole number, 0 or above")]
Seed = Annotated[int, Meta(ge=0, lt=2**62, description="a whole number from 0 to 2**62 - 1")]
AboveZero = Annotated[float, Meta(gt=0.0, description="a number above 0")]
ZeroOrAbove = Annotated[float, Meta(ge=0.0, description="a number, 0 or above")]
Seconds = Annotated[float, Meta(gt=0.0, lt=1e6, description="a number of seconds above 0 and below 1000000")]
Rate = Annotated[float, Meta(ge=0.0, le=_LARGEST, description="a finite number, 0 or above")]
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST, description="a finite number")]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]


def _address(text: str) -> None:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is no address such as http://127.0.0.1:8000")


BridgeName = Annotated[str, check_bridge_name]
Address = Annotated[str, _address]  # a function checks the value, and raises ValueError
_PLAIN = {bool: "true or false", str: "a text", float: "a number"}


class Option:
    """A section's field as flags and files need it.

    Attributes:
        flag: of the command line; for a switch that is on by default, the flag turns it off.
        shape: "switch", "choice", "list", "pair" or "mapping"; any other value is a "value".
        item: the type of the value, or of each of several.
        default: MISSING for a required option.
    """

    def __init__(self, section: str, declared: Field[Any], hint: Any, metavar: str | None, text: str) -> None:
        self.section, self.name, self._hint = section, declared.name, hint
        default: Any = declared.default if declared.default_factory is MISSING else declared.default_factory()
        self.flag = f"--{'no-' if default is True else ''}{self.name.replace('_', '-')}"
        optional = get_origin(hint) in (Union, types.UnionType)  # the other type is None's
        kind = get_args(hint)[0] if optional else hint
        parts = get_args(kind)
        if kind is bool:
            self.shape, self.item = "switch", bool
        elif get_origin(kind) is Literal:
            self.shape, self.item = "choice", kind
        elif get_origin(kind) is tuple:
            self.shape, self.item = "list" if parts[1] is ... else "pair", parts[0]
        elif get_origin(kind) is Mapping:
            self.shape, self.item = "mapping", parts[1]
        else:
            self.shape, self.item = "value", kind
        self.default, self.metavar = default, metavar or ("N" if get_args(self.item)[:1] == (int,) else "X")
        self.help = text
        if (
            self.shape in ("choice", "value")
            and default not in (MISSING, None, "")
            and not text.endswith("]")
        ):
            self.help += f" [{default:g}]" if isinstance(default, float) else f" [{default}]"

    def one(self, value: object) -> Any:
        """Converts one value to its type. Raises ValueError that names the expected form."""
        return self._checked(value, self.item)

    def whole(self, value: object) -> Any:
        """Converts the option's whole value to its type. Raises ValueError that names the expected form."""
        return self._checked(value, self._hint)

    def _checked(self, value: object, hint: Any) -> Any:
        try:
            found = msgspec.convert(plain(value), hint)
        except msgspec.ValidationError:
            raise ValueError(f"{shown_value(value)} is not {self._wanted(hint)}") from None
        for check in (each for each in get_args(self.item) if isinstance(each, types.FunctionType)):
            for text in found if isinstance(found, tuple) else [] if found is None else [found]:
                check(text)
        return found

    def _wanted(self, hint: Any) -> str:
        if self.shape == "choice":
            return f"one of {', '.join(get_args(self.item))}"
        one = described(self.item)
        if hint is self.item:
            return one
        shapes = {
            "list": f"a list, each {one}",
            "pair": f"a list of two, each {one}",
            "mapping": f"a mapping from names, each to {one}",
        }
        return shapes.get(self.shape, one)


def described(kind: Any) -> str:
    """Returns a description of a type's values."""
    return next(
        (str(each.description) for each in get_args(kind) if isinstance(each, Meta)),
        _PLAIN.get((get_args(kind) or (kind,))[0], str(kind)),
    )


_ENTRY = re.compile(r"^    (\w+)(?: \(([^)]+)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)


def options_of(section: str, kind: Any) -> Iterator[Option]:
    """Yields a section's options; its docstring has their help: `name (METAVAR): text [default in words]`."""
    hints, entries = get_type_hints(kind, include_extras=True), _ENTRY.findall(kind.__doc__ or "")
    texts = {name: (metavar, " ".join(text.split())) for name, metavar, text in entries}
    for each in fields(kind):
        yield Option(section, each, hints[each.name], *texts.get(each.name, ("", "")))
