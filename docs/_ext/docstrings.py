"""Makes reStructuredText of docstrings, which are plain text with `names` and sections such as "Args:".

Napoleon reads the sections afterwards. What reStructuredText alone would see as markup is kept as text.
"""

import re
from typing import Any

from sphinx.application import Sphinx

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes):")
_MARKUP = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def _inline(line: str) -> str:
    """Keeps `a_name` as a reference, makes `any code` a literal, and escapes other markup."""
    parts = line.split("`")
    if len(parts) % 2 == 0:  # a backtick without its other half
        return line.replace("`", r"\`")
    for number, part in enumerate(parts):
        if number % 2 == 0:
            parts[number] = _MARKUP.sub(r"\\\1", part)
        elif _NAME.fullmatch(part):
            parts[number] = f"`{part}`"
        else:
            parts[number] = f"``{part}``"
    return "".join(parts)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def converted(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring as reStructuredText.

    An indented paragraph after a blank line is code. Outside of sections, lines that are indented within a
    paragraph belong to it.
    """
    found: list[str] = []
    code_deeper_than: int | None = None
    last = ""  # the last line with text
    in_section = False
    for number, line in enumerate(lines):
        if not line.strip():
            found.append("")
            continue
        if code_deeper_than is not None and _indent(line) > code_deeper_than:
            found.append(line)
            continue
        code_deeper_than = None
        after_blank = number > 0 and not lines[number - 1].strip()
        if not _indent(line):
            in_section = _SECTION.fullmatch(line) is not None
        if after_blank and last and _indent(line) > _indent(last):
            code_deeper_than = _indent(last)
            found += [f"{' ' * code_deeper_than}::", "", line]
        else:
            joins = not in_section and not after_blank and last and not last.lstrip().startswith(("- ", "* "))
            found.append(_inline(" " * _indent(last) + line.lstrip() if joins else line))
            line = found[-1]
        last = line
    return found


def _convert(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = converted(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _convert, priority=400)  # before napoleon's
    return {"parallel_read_safe": True}
