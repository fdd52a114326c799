"""Puts parts of text side by side into lines; a part is not broken where that can be avoided."""


def folded(parts: list[str], width: int, between: str = "  ") -> list[str]:
    """Returns lines of at most `width` characters; a longer part has a line of its own."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines
