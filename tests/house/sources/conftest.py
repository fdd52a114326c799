"""The sources in the form that the tests of rules need."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for import_graph

from import_graph import imports, modules

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def sources() -> list[tuple[str, Path]]:
    """(dotted name, file) of every Python and Cython source that is installed."""
    return list(modules(ROOT).items())


@pytest.fixture(scope="session")
def python_imports(sources) -> list[tuple[str, str, str, bool]]:
    """(module, imported name, line, only for type checkers)."""
    return [
        (name, imported, f"{path.relative_to(ROOT)}:{line}", for_types)
        for name, path in sources
        if path.suffix == ".py"
        for imported, line, for_types in imports(name, path)
    ]
