"""The width of text on a terminal, where a Chinese character takes two cells and an accent none."""

import unicodedata

_NO_CELL = ("Mn", "Me", "Cf")  # stand on the character before them, or are not shown


def cells(text: str) -> int:
    """Returns how many cells a terminal shows the text in. Never blocks."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def cut(text: str, width: int) -> str:
    """Returns the text in at most `width` cells, with … at its end if some is left out. Never blocks."""
    if cells(text) <= width:
        return text
    left, kept = width - 1, ""
    for each in text:
        left -= _cells_of(each)
        if left < 0:
            break
        kept += each
    return f"{kept}…" if width > 0 else ""


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Returns the text with blanks behind it, or before it if it stands right, up to `width` cells.

    Never blocks.
    """
    blanks = " " * (width - cells(text))
    return blanks + text if right else text + blanks


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in _NO_CELL:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
