"""Puts parts of text side by side into lines; a part is not broken where that can be avoided."""

from shmbridge.watch.cells import cells


def folded(parts: list[str], width: int, between: str = "  ") -> list[str]:
    """Returns lines of at most `width` cells; a longer part has a line of its own."""
    lines: list[str] = []
    for part in parts:
        if lines and cells(lines[-1]) + cells(between) + cells(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines
