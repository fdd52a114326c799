"""How records and batches show themselves: completion, and a table in Jupyter. Reads no values."""

from collections.abc import Collection, Iterable
from html import escape


def user_names(names: Iterable[str], hidden: Collection[str]) -> list[str]:
    """Returns what `dir` shows, without the names that only the bridge itself uses."""
    return sorted({name for name in names if name not in hidden})


def columns_as_html(title: str, columns: Iterable[tuple[str, str]]) -> str:
    """Returns a title and a table of names and their descriptions."""
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(said)}</td></tr>" for name, said in columns
    )
    return f"<div><code>{escape(title)}</code><table>{rows}</table></div>"
