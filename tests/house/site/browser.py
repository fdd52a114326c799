"""Chromium without a window."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote_plus

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _run(*words: str) -> str:
    assert CHROMIUM, "chromium is not installed: apt-get install chromium"
    with tempfile.TemporaryDirectory() as profile:
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        )
        done = subprocess.run(
            [CHROMIUM, *flags, *words], capture_output=True, text=True, timeout=60, check=True
        )
    return done.stdout


def page(url: str) -> str:
    """Returns a page's elements after its scripts have run."""
    return _run("--virtual-time-budget=8000", "--dump-dom", url)


def found(address: str, question: str) -> list[str]:
    """Returns the pages that the site's search finds, best first, each once."""
    text = page(f"{address}/search.html?q={quote_plus(question)}")
    links = re.findall(r'<li[^>]*><a href="([^"#?]+)', text[text.index('id="search-results"') :])
    return list(dict.fromkeys(links))


def screenshot(url: str, into: Path, width: int = 1300, height: int = 1000) -> None:
    """Writes a PNG of a page."""
    _run(f"--window-size={width},{height}", f"--screenshot={into}", url)
