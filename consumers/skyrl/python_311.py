"""Makes SkyRL importable on Python 3.11, where pydantic refuses a `typing.TypedDict` inside a model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import typing
from contextlib import suppress

import typing_extensions

_MODULE = "skyrl.tinker.types"  # the only one with such a model, in 0.3


def prepare() -> None:
    """Imports that module of SkyRL with the `TypedDict` that pydantic takes; `typing` stays as it was.

    Does nothing from Python 3.12 on, without SkyRL or that module of it, and if it is imported already.
    Blocks for the import.
    """
    if sys.version_info >= (3, 12) or _MODULE in sys.modules or importlib.util.find_spec("skyrl") is None:
        return
    before = typing.TypedDict
    typing.TypedDict = typing_extensions.TypedDict
    try:
        with suppress(ModuleNotFoundError):  # another release may not have it
            importlib.import_module(_MODULE)
    finally:
        typing.TypedDict = before
