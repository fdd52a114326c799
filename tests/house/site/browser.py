"""Chromium without a window."""

import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote_plus

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder's files while the `with` lasts; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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
    """Returns the pages that the site's search shows, best first, each once."""
    text = page(f"{address}/search.html?q={quote_plus(question)}")
    links = re.findall(r'<li[^>]*><a href="([^"#?]+)', text[text.index('id="search-results"') :])
    return list(dict.fromkeys(links))


# What the page of the search loads, and then a search for each question.
MANY_QUESTIONS = """<!doctype html><html data-content_root="./"><body>
<script src="_static/documentation_options.js"></script>
<script src="_static/doctools.js"></script>
<script src="_static/sphinx_highlight.js"></script>
<script src="_static/searchtools.js"></script>
<script src="_static/language_data.js"></script>
<script src="searchindex.js"></script>
<script>
  const found = (question) => Search._performSearch(...Search._parseQuery(question)).reverse();
  const pages = (question) => [...new Set(found(question).map(([page]) => page))];
  const answers = %s.map((question) => pages(question).slice(0, 8));
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = JSON.stringify(answers);
</script></body></html>"""


def found_by_each(address: str, folder: Path, questions: list[str]) -> dict[str, list[str]]:
    """Returns what the site's search finds for each question, best first, by one page put into its folder."""
    there = folder / "many-questions.html"
    there.write_text(MANY_QUESTIONS % json.dumps(questions))
    try:
        text = page(f"{address}/{there.name}")
    finally:
        there.unlink()
    (answers,) = re.findall(r"<pre>(.*?)</pre>", text)
    return dict(zip(questions, json.loads(answers), strict=True))


def screenshot(url: str, into: Path, width: int = 1300, height: int = 1000) -> None:
    """Writes a PNG of a page."""
    _run(f"--window-size={width},{height}", f"--screenshot={into}", url)
