"""No page promises what is there already, or what nobody has made."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [
    *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
    *(page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts),
    *(ROOT / "examples").rglob("*.md"),
    ROOT / "bench/README.md",
]
PROMISES = re.compile(
    r"\b(to come(?! up)|coming soon|not yet (implemented|supported|there|possible|available)|will be "
    r"(added|supported|implemented|available)|is planned|are planned|TODO|FIXME|work in progress)\b"
)


def promises(text: str) -> list[str]:
    """Returns the lines that promise something; a quoted word is none."""
    plain = re.sub(r'"[^"\n]*"', "", text)
    return [line.strip()[:100] for line in plain.splitlines() if PROMISES.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_is_promised(page: Path) -> None:
    assert promises(page.read_text()) == []


def test_a_promise_is_seen() -> None:
    assert promises("a\nthe other trainers' adapters are to come.\n") == [
        "the other trainers' adapters are to come."
    ]
    assert promises('a backend "to come"') == []
    assert promises("committed and not yet in a batch") == []
