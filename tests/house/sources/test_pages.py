"""Pages name files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_files_that_pages_name_are_there():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    named = {
        (page, name)
        for page in pages
        if page.name != "CHANGELOG.md"
        for name in re.findall(
            r"`((?:shmbridge|consumers|producers|tests|bench|docs|examples)/[\w./-]+\.\w+)(?::\w+)?`",
            page.read_text(),
        )
    }
    assert len(named) > 30
    assert not [f"{page.name}: {name}" for page, name in sorted(named) if not (ROOT / name).exists()]
