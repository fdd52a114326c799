"""Makes browser importable here, and serves the site that `make docs` built."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
SITE = Path(__file__).parents[3] / "build/site"


@pytest.fixture(scope="session")
def site() -> Path:
    assert (SITE / "index.html").exists(), "build the site first: make docs"
    return SITE


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    import browser

    with browser.served(site) as address:
        yield address
