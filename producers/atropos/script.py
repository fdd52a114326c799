"""What an environment's script says of itself, read and not run: `wants_main_thread`."""

from __future__ import annotations

import ast
import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_ALARMS = frozenset({"alarm", "setitimer", "signal", "set_wakeup_fd", "add_signal_handler"})
# Packages that set alarms themselves when they are called.
_ALARMING = frozenset({"math_verify"})
_DEPTH = 4  # from a script to what its helpers import

_parsing = threading.Lock()  # Python 3.11 raises SystemError where two threads make trees at once


@functools.lru_cache(256)
def wants_main_thread(script: Path) -> str:
    """Returns why an environment has to run in a main thread; "" where nothing says so. Reads files, once.

    Signals and alarms work there alone: `math_verify` sets an alarm for each answer. The script is looked at,
    and those modules beside it, and of atroposlib, that it imports.
    """
    for path, tree in _reached(script, set(), _DEPTH):
        for node in ast.walk(tree):
            for name in _imported(node):
                if name.partition(".")[0] in _ALARMING:
                    return f"{path.name} imports {name.partition('.')[0]}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value
                is_signal = isinstance(of, ast.Name) and of.id == "signal"
                if node.func.attr in _ALARMS and (is_signal or node.func.attr == "add_signal_handler"):
                    return f"{path.name} calls {node.func.attr} in line {node.lineno}"
    return ""


def _reached(script: Path, seen: set[Path], depth: int) -> Iterator[tuple[Path, ast.Module]]:
    script = script.resolve()
    if script in seen or depth < 0:
        return
    seen.add(script)
    try:
        with _parsing:
            tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield script, tree
    for node in ast.walk(tree):
        for name in _imported(node, relative=True):
            helper = _file_of(name, script)
            if helper is not None:
                yield from _reached(helper, seen, depth - 1)


def _imported(node: ast.AST, relative: bool = False) -> list[str]:
    """Names of modules, and of what is imported from them, which may be modules."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        place = "." * node.level * relative + (node.module or "")
        if node.level and not relative:
            return []
        return [place, *(f"{place}.{each.name}" if node.module else place + each.name for each in node.names)]
    return []


def _file_of(name: str, script: Path) -> Path | None:
    """The file of a module beside the script, above it up to the folder of its imports, or of atroposlib."""
    level = len(name) - len(name.lstrip("."))
    parts = name.lstrip(".").split(".")
    folders = [script.parents[level - 1]] if level else [script.parent]
    if not level and (parts[0] == "atroposlib" or parts[0] in script.parts):
        folders += [Path(each) for each in sys.path if each] + list(script.parents)
    for folder in folders:
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return path
    return None
