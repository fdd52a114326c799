"""The long description on a page that has none of the repository's files."""

import re
import shutil
import sys
from email import message_from_string
from pathlib import Path

import pytest

from tests.house.packaging.conftest import run

md = pytest.importorskip("readme_renderer.markdown")
URL = "https://example.org/shmbridge"


@pytest.fixture
def rendered(tree: Path, tmp_path: Path):
    """The metadata of the tree, with a Repository or none, as a package page shows it."""

    def render(url: str | None) -> str:
        for name in ("setup.py", "package_page.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(tree / name, tmp_path / name)
        if url:
            with (tmp_path / "pyproject.toml").open("a") as project:
                project.write(f'\n[project.urls]\nRepository = "{url}/"\n')
        for name in ("shmbridge", "producers", "consumers", "bench"):
            (tmp_path / name).symlink_to(tree / name)
        run(sys.executable, "setup.py", "-q", "egg_info", "-e", ".", cwd=tmp_path, SHMBRIDGE_EXTENSIONS="0")
        said = message_from_string((tmp_path / "shmbridge.egg-info/PKG-INFO").read_text())
        assert said["Description-Content-Type"] == "text/markdown"
        shown = md.render(said.get_payload())
        assert shown
        return shown

    return render


def targets(page: str, attribute: str) -> list[str]:
    """But for the page's own headings."""
    return re.findall(rf'\b{attribute}="([^#"][^"]*)"', page)


def test_without_a_repository_nothing_is_relative(rendered) -> None:
    page = rendered(None)
    assert (targets(page, "href"), targets(page, "src")) == ([], [])
    assert "](" not in page
    assert "Terminal recording" not in page, "a picture's text goes with it"
    assert "All pages" in page, "a link's text stays"


def test_with_a_repository_all_is_under_it(rendered) -> None:
    page = rendered(URL)
    links, images = targets(page, "href"), targets(page, "src")
    assert f"{URL}/blob/HEAD/docs/README.md" in links
    assert f"{URL}/raw/HEAD/docs/figures/overview.svg" in images
    assert [each for each in links + images if not each.startswith(f"{URL}/")] == []


def test_what_is_no_file_stays(monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    from package_page import package_page

    kept = "[a](https://example.org/a) `[b](c)` ![d](http://example.org/d.svg)\n```\n[e](f)\n```\n"
    assert package_page(kept, None) == package_page(kept, URL) == kept
    assert package_page("[a](#b)", URL) == f"[a]({URL}/blob/HEAD/README.md#b)"


def test_the_archive_passes_the_check_of_an_index(sdist: Path) -> None:
    pytest.importorskip("twine")
    assert "PASSED" in run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", sdist)
