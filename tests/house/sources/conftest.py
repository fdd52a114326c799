"""The sources as the rules see them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for import_graph

ROOT = Path(__file__).parents[3]
MAPPED = ("producers", "consumers", "bench")  # folders beside the package that are installed in it


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every Python and Cython source that is installed."""
    folders = {"shmbridge": "shmbridge"} | {name: f"shmbridge.{name}" for name in MAPPED}
    for folder, package in folders.items():
        root = ROOT / folder
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.pyx")]):
            below = path.relative_to(root)
            if folder == "shmbridge" and below.parts[0] in MAPPED:
                continue  # links to the folders beside it
            parts = [*below.parent.parts, *([] if path.stem == "__init__" else [path.stem])]
            yield ".".join([package, *parts]), path


def imports(path: Path, package: str) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, only for type checkers) of everything a Python file imports, wherever it stands."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in for_types
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [
                        *package.split(".")[: len(package.split(".")) - node.level + 1],
                        *([base] if base else []),
                    ]
                )
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, id(node) in for_types


@pytest.fixture(scope="session")
def sources() -> list[tuple[str, Path]]:
    return list(modules())


@pytest.fixture(scope="session")
def python_imports(sources) -> list[tuple[str, str, str, bool]]:
    """(module, what it imports, where, only for type checkers)."""
    return [
        (name, imported, f"{path.relative_to(ROOT)}:{line}", for_types)
        for name, path in sources
        if path.suffix == ".py"
        for imported, line, for_types in imports(
            path, name if path.stem == "__init__" else name.rpartition(".")[0]
        )
    ]
