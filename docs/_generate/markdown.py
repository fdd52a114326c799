"""Tables and code of Markdown."""

import re
from collections.abc import Iterable, Sequence

# Words of a text that are shown as code: flags, names with underscores, file names, paths of keys.
_CODE = re.compile(
    r"(?<![\w`<-])(--[a-z][\w-]*|[a-zA-Z]+(?:_[a-zA-Z0-9]+)+(?:\(\))?|\w+\.(?:jsonl|yaml|json)|tensorboard/)(?![\w`>])"
)


def code(text: object) -> str:
    """Returns a text as code, for a cell of a table."""
    return f"`{text}`".replace("|", "\\|") if str(text) else ""


def prose(text: str) -> str:
    """Returns a help text for a cell of a table: names as code; what Markdown takes for markup, escaped."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return "".join(
        part if number % 2 else _CODE.sub(r"`\1`", part)
        for number, part in enumerate(re.split(r"(`[^`]*`)", text))
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)
