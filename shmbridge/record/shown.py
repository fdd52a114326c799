"""The table that Jupyter shows of a record or batch. Reads no values."""

from collections.abc import Iterable
from html import escape


def columns_as_html(title: str, columns: Iterable[tuple[str, str]]) -> str:
    """Returns a title and a table of names and their descriptions."""
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(said)}</td></tr>" for name, said in columns
    )
    return f"<div><code>{escape(title)}</code><table>{rows}</table></div>"
