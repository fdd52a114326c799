"""Every page under docs/ is in docs/README.md, and every link of a page leads to a file and a heading."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    return [target for target in found if not target.startswith(("http://", "https://", "mailto:"))]


def anchors(page: Path) -> set[str]:
    """Returns the names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    listed = {(DOCS / target.split("#")[0]).resolve() for target in links(index)}
    assert [str(page) for page in PAGES if page != index and page.resolve() not in listed] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in links(page):
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (heading and there.suffix == ".md" and heading not in anchors(there)):
            wrong.append(target)
    assert wrong == []
