"""The tests that docs/reference/trainers.md names are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs/reference/trainers.md"


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"`([a-z_/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) >= 20
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (TESTS / path).read_text()]
    assert not missing


def test_every_section_that_the_page_links_to_is_there():
    for path, section in re.findall(r"\]\(([^)#]+)#([^)]+)\)", PAGE.read_text()):
        titles = re.findall(r"^#+ (.+)$", (PAGE.parent / path).read_text(), re.MULTILINE)
        kept = [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert section in kept, (path, section)
