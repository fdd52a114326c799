"""Finds an Atropos environment's class: `environment_class`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from shmbridge.errors import BadArgument

_loading = threading.Lock()


def environment_class(environment: Any) -> type[Any]:
    """Returns the class of an Atropos environment. Blocks while its module is imported; any thread.

    Args:
        environment: the class itself, "package.module:Class", or "path/to/file.py:Class". A file's folder is
            added to the end of `sys.path`, for what lies beside it.

    Raises:
        BadArgument: there is no such class, or it is no environment.
        Exception: whatever importing the module raises.
    """
    found = _named(environment) if isinstance(environment, str) else environment
    if not isinstance(found, type) or not hasattr(found, "collect_trajectories"):
        raise BadArgument(
            f"{environment!r} is no Atropos environment", hint="give a subclass of BaseEnv, or path.py:Class"
        )
    return found


def file_of(environment: Any) -> Path | None:
    """Returns the file of an environment that `environment_class` would find, without importing it.

    None where it is not known. The packages that a dotted name stands in are imported.
    """
    if not isinstance(environment, str):
        source = inspect.getsourcefile(environment) if isinstance(environment, type) else None
        return None if source is None else Path(source)
    place = environment.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place)
    try:
        spec = importlib.util.find_spec(place) if place else None
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _named(name: str) -> Any:
    place, separator, class_name = name.rpartition(":")
    if not separator or not place or not class_name:
        raise BadArgument(
            f"{name!r} names no class", hint='"package.module:Class" or "path/to/file.py:Class"'
        )
    module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    try:
        return getattr(module, class_name)
    except AttributeError:
        raise BadArgument(f"{place} has no {class_name}", hint="name the environment's class") from None


def _of_file(path: Path) -> ModuleType:
    """The same module for the same file, so that classes are the same."""
    if not path.is_file():
        raise BadArgument(f"there is no file {path}", hint="give the path of the environment's .py file")
    path = path.resolve()
    name = f"shmbridge_env_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    with _loading:
        if name in sys.modules:
            return sys.modules[name]
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
