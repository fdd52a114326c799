"""The page of attacks names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/explanation/attacks.md"


def test_every_test_it_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::([\w:]+))?`", PAGE.read_text())
    assert len(named) > 100
    for path, name in named:
        source = (ROOT / "tests" / path).read_text()
        for part in filter(None, name.split("::")):
            assert part == "runTest" or re.search(
                rf"(?:def|class) {part}\b|^{part} = ", source, re.MULTILINE
            ), f"{path}::{name}"
