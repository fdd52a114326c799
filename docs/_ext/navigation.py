"""Makes the site's navigation of docs/README.md: its headings, and its lists of links in their order.

A page comes under the heading where a list names it first, and is called there as the list calls it. The
order is that of the links to the previous and the next page, too.
"""

import posixpath
import re
from collections.abc import Iterator

from sphinx.application import Sphinx

INDEX = "docs/README"
_NAMES = {"gem", "shmbridge.testing", "verl"}  # written in lower case
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)")


def groups(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields each heading with links, as "How to: run it", and its pages: names, and paths without `.md`."""
    chapters = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    seen: set[str] = set()
    for chapter, body in zip(chapters[::2], chapters[1::2], strict=True):
        parts = re.split(r"^### (.+)$", body, flags=re.MULTILINE)
        for heading, links in zip(["", *parts[1::2]], parts[::2], strict=True):
            pages = []
            for called, target in _LINK.findall(links):
                page = posixpath.normpath(posixpath.join(posixpath.dirname(INDEX), target)).removesuffix(
                    ".md"
                )
                if page not in seen:
                    seen.add(page)
                    called = called.replace("`", "")
                    pages.append((called if called in _NAMES else called[0].upper() + called[1:], page))
            if pages:
                yield f"{chapter}: {heading[0].lower()}{heading[1:]}" if heading else chapter, pages


def _add_toctrees(app: Sphinx, page: str, content: list[str]) -> None:
    if page == INDEX:
        for caption, pages in groups(content[0]):
            entries = "\n".join(f"{called} </{each}>" for called, each in pages)
            content[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption!r}\n\n{entries}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _add_toctrees)
    return {"parallel_read_safe": True}
