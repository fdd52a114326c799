"""What the site's search shows first, beyond the words of the pages.

A page ends with what people type for it: `<!-- Search: k8s, kubectl -->`; such a comment above the end is for
its section. In pages of reference, the names that begin the rows of tables lead to their rows.
"""

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

_COMMENT = re.compile(r"<!-- Search: (.+?) -->\s*", re.DOTALL)
_NAME = re.compile(r"[A-Za-z-][\w./-]{2,}")
# How many cells of a row name what it is about.
_NAMING_CELLS = {"docs/reference": 1, "docs/errors": 2}


def phrases(text: str) -> list[str]:
    """Returns the phrases of a comment, or none if it is another one."""
    found = _COMMENT.fullmatch(text)
    return [" ".join(each.split()).lower() for each in found[1].split(",")] if found else []


def _index(names: list[str], place: str) -> addnodes.index:
    return addnodes.index(entries=[("single", each.lower(), place, "main", None) for each in names])


class SearchWords(SphinxTransform):
    """Makes entries of the index of the comments and of the rows; a comment's words are keywords, too."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        """Called by Sphinx for each page."""
        for comment in list(self.document.findall(nodes.raw)):
            if found := phrases(comment.astext()):
                words = ",".join(sorted({word for phrase in found for word in phrase.split()}))
                index = _index(found, self._place(comment))
                comment.replace_self([index, nodes.meta(name="keywords", content=words)])
        cells = _NAMING_CELLS.get(self.env.docname.rpartition("/")[0], 0)
        for body in self.document.findall(nodes.tbody):
            for row in body.findall(nodes.row):
                self._name(row, cells)

    def _place(self, comment: nodes.raw) -> str:
        section = comment.parent
        at_the_end = comment is list(self.document.findall(nodes.raw))[-1] and comment is section.children[-1]
        return "" if at_the_end else section["ids"][0]

    def _name(self, row: nodes.row, cells: int) -> None:
        texts = [cell.astext() for cell in row.children[:cells]]
        names = [name for text in texts if len(text.split()) == 1 for name in _NAME.findall(text)]
        if names:
            place = nodes.make_id(f"row-{names[0]}")
            row.children[0]["ids"].append(place)
            row.children[0].insert(0, _index(names, place))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_transform(SearchWords)
    return {"parallel_read_safe": True}
