"""Links of pages to files of the repository that are no pages, such as Python sources and folders.

A linked file is shown on a page of its own, at its path with `.html` after it; a linked folder is shown as
its README, or as a list. Pictures, which HTML written by hand asks for, are copied to the path that they have
in the repository.
"""

import posixpath
import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

_PICTURES = {".svg", ".png", ".gif"}


class LinksToFiles(SphinxTransform):
    """Makes links of what MyST takes for downloads, and for unknown names."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        """Called by Sphinx for each page."""
        page, root = self.env.docname, Path(self.env.srcdir)
        links = [
            *self.document.findall(addnodes.download_reference),
            *self.document.findall(addnodes.pending_xref),
        ]
        for link in links:
            if isinstance(link, addnodes.pending_xref) and (
                link["reftype"] != "myst" or link.get("refdomain")
            ):
                continue
            target = posixpath.normpath(
                posixpath.join(posixpath.dirname(page), link["reftarget"].split("#")[0])
            )
            if target.startswith("../") or not (root / target).exists():
                continue
            if Path(target).suffix in _PICTURES:
                goal = target  # copied
            elif (root / target / "README.md").exists():
                goal = f"{target}/README.html"
            else:
                self.env.repository_files.setdefault(page, set()).add(target)
                goal = f"{target}.html"
            text = link.astext()
            new = nodes.reference("", "", refuri=relative_uri(f"{page}.html", goal), internal=True)
            new += link.children[0].children if link.children else [nodes.Text(text)]
            link.replace_self(new)


def _begin(app: Sphinx, env: Any, *_: Any) -> None:
    if not hasattr(env, "repository_files"):
        env.repository_files = {}


def _forget(app: Sphinx, env: Any, page: str) -> None:
    env.repository_files.pop(page, None)


def _merge(app: Sphinx, env: Any, pages: set[str], other: Any) -> None:
    env.repository_files.update(
        {page: files for page, files in other.repository_files.items() if page in pages}
    )


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    root = Path(app.srcdir)
    for target in sorted(set().union(*app.env.repository_files.values())):
        path = root / target
        if path.is_dir():
            body = "\n".join(
                sorted(
                    f"{each.name}{'/' * each.is_dir()}" for each in path.iterdir() if each.name[0] not in "._"
                )
            )
            code = f"<pre>{escape(body)}</pre>"
        else:
            try:
                lexer = get_lexer_for_filename(target)
            except ClassNotFound:
                lexer = TextLexer()
            code = highlight(path.read_text(), lexer, HtmlFormatter(linenos=False, lineanchors="L"))
        yield target, {"title": target, "body": f"<h1>{escape(target)}</h1>{code}"}, "page.html"


def _copy(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for each in Path(app.srcdir, "docs/figures").iterdir():
            if each.suffix in _PICTURES:
                there = Path(app.outdir, "docs/figures", each.name)
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(each, there)
        home = f"{app.config.root_doc}.html"
        Path(app.outdir, "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>{app.config.project}</title>'
            f'<meta http-equiv="refresh" content="0; url={home}"><a href="{home}">{app.config.project}</a>\n'
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_transform(LinksToFiles)
    app.connect("env-before-read-docs", _begin)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)
    app.connect("html-collect-pages", _pages)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "env_version": 1}
