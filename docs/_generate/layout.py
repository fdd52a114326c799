"""The page of the segments' layout, from the structs and comments of layout.h."""

import re
from collections.abc import Iterator
from pathlib import Path

from markdown import code, prose, table

_HEADER = Path(__file__).parents[2] / "shmbridge/_ext/c/layout.h"
_HEAD = """# Layout of segments

Every byte that processes share, version {version}. Little-endian; positions are 64-bit and only rise; each role's words have 128-byte lines of their own. "P" is written by the
lane's producer only, "H" by the hub that holds the hub lock, "W" by the holder of the weights writer's lock; "A" is only ever added to, atomically. A segment of
another version is refused with both versions shown ([SB201](../errors/README.md)): upgrade both sides together. Why it is so: [lanes](../adr/0001-lanes.md); which stores are ordered: [memory model](../memory-model.md).

```text
{picture}
```

<!-- Written by docs/_generate from shmbridge/_ext/c/layout.h. -->

<!-- Search: upgrade, upgrade one side, mixed versions, version mismatch, abi, layout, binary format -->
"""
_STRUCTS = {
    "control_header": "The control segment, `/shmbridge.BRIDGE.c`. The column table follows it.",
    "lane_header": "A lane, `/shmbridge.BRIDGE.l.ID`. Column table, ring, slots, `released` and data follow it.",
    "column_def": "One entry of a column table.",
    "slot": "One record of a lane, written before `generation`. A slot is free exactly if `released[i] == generation`.",
    "directory_entry": "One per column that a record has, at the start of its extent. Places are in 64-byte lines from the extent's start; 0 means absent.",
    "weights_header": "The weights segment, `/shmbridge.BRIDGE.w`. A table as JSON, words per tensor, and the slots follow it.",
}
_BYTES = {
    "shm_u64": 8,
    "uint64_t": 8,
    "int64_t": 8,
    "shm_u32": 4,
    "uint32_t": 4,
    "int32_t": 4,
    "uint16_t": 2,
    "uint8_t": 1,
    "char": 1,
}
_PIECE = re.compile(r"/\*.*?\*/|[^;/]+;|/", re.DOTALL)


def _constants(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in re.findall(r"^#define (\w+) \(?([^/\n]+?)\)?(?: */\*.*)?$", text, re.MULTILINE):
        expression = re.sub(r"(?<=\d)u(ll)?\b", "", value)
        if re.fullmatch(r"[\w+*() <x]+", expression):
            found.setdefault(name, eval(expression, {}, dict(found)))
    for name, number in re.findall(r"(\w+) = (\d+)[,\s}]", text):
        found[name] = int(number)
    return found


def _comment(text: str) -> str:
    return " ".join(re.sub(r"\n\s*\*", "\n", text[2:-2]).split())


def _fields(body: str, constants: dict[str, int]) -> Iterator[list[str]]:
    """Yields offset, type, name and comment of each field that is no padding."""
    at, before, rows = 0, "", []
    first = end_of_field_at = 0
    for piece in _PIECE.finditer(body):
        text = piece[0]
        if text.startswith("/*"):
            same_line = end_of_field_at and "\n" not in body[end_of_field_at : piece.start()]
            if same_line:
                for row in rows[first:]:
                    row[3] = _comment(text)
            else:
                before = _comment(text)
            continue
        kind, names = re.fullmatch(r"\s*(\w+)\s+(.+);", text, re.DOTALL).groups()
        first, end_of_field_at = len(rows), piece.end()
        for name, _, size in re.findall(r"(\w+)(\[([^\]]+)\])?", names):
            count = eval(size, {}, constants) if size else 1
            if not re.fullmatch(r"pad\d*|reserved", name):
                rows.append(
                    [
                        f"`0x{at:03x}`",
                        code(kind.replace("shm_u", "uint").replace("_t", "")),
                        code(f"{name}[{size}]" if size else name),
                        before,
                    ]
                )
            at += count * _BYTES[kind]
        before = ""
    yield from rows


def page() -> str:
    """Returns the page."""
    text = _HEADER.read_text()
    constants = _constants(text)
    picture = text[text.index(" *   control segment") : text.index(" */\n#ifndef")]
    lines = [line.removeprefix(" *").rstrip()[3:] for line in picture.splitlines()]
    parts = [_HEAD.format(version=constants["LAYOUT_VERSION"], picture="\n".join(lines))]
    for name, about in _STRUCTS.items():
        body = re.search(r"typedef struct \{((?:(?!typedef struct).)*?)\} " + name + ";", text, re.DOTALL)[1]
        rows = [[at, kind, field, prose(comment)] for at, kind, field, comment in _fields(body, constants)]
        parts.append(
            f"## {name}\n\n{about}\n\n" + table(["at", "type", "name", "who writes it, and what it is"], rows)
        )
    kinds = re.search(r" \*   kind       values.*?(?=\n \*\n)", text, re.DOTALL)[0]
    cells = [re.split(r"  +", line.removeprefix(" *").strip()) for line in kinds.splitlines()]
    parts.append(
        "## Kinds of column\n\n" + table([*cells[0]], ([code(row[0]), *row[1:]] for row in cells[1:]))
    )
    return "\n".join(parts)
