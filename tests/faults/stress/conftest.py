"""Makes the parts of kill_fuzz.py importable here, as they are beside the script. What a fuzz finds once is
found: it has no second look, in CI neither.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.flaky(reruns=0))
