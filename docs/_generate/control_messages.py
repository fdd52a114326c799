"""The page of the control messages, from their structs."""

import re
from typing import Any, get_args, get_type_hints

import msgspec
from markdown import code, prose, table

from shmbridge.control import messages

_HEAD = """# Control messages

What participants of a bridge and its hub say to each other over the control socket, a ZeroMQ socket in an owner-only directory beside the segments. A
request and its answer are two frames each: a header `[protocol, request id]` and a msgpack map whose `kind` is the message's name in lower case. The header is
readable across protocol numbers. Every request is idempotent: a lost answer is asked for again. Trajectories never travel here. Protocol {protocol}; at most
{most} MiB a message. The Python names are in `shmbridge.control.messages`.

<!-- Written by docs/_generate from shmbridge/control/messages.py. -->
"""


def _type(hint: Any) -> str:
    if not getattr(hint, "__args__", ()):
        return str(getattr(hint, "__name__", hint))
    return re.sub(r"[\w.]+\.", "", str(hint))


def _fields(kind: type[msgspec.Struct]) -> str:
    hints, rows = get_type_hints(kind), []
    for field in msgspec.structs.fields(kind):
        default = "required" if field.required else code(repr(field.default))
        rows.append([code(field.name), code(_type(hints[field.name])), default])
    return "\n" + table(["field", "type", "default"], rows) if rows else ""


def _message(kind: type[msgspec.Struct]) -> str:
    paragraphs = [prose(" ".join(each.split())) for each in (kind.__doc__ or "").split("\n\n")]
    text = "\n\n".join(paragraphs).replace(
        "docs/reference/manifest.md describes each field", "[each field](manifest.md)"
    )
    return f"### {kind.__name__}\n\n{text}\n{_fields(kind)}"


def page() -> str:
    """Returns the page."""
    codes = [
        value
        for name, value in vars(messages).items()
        if re.fullmatch(r"[A-Z_]+", name) and isinstance(value, str)
    ]
    parts = [_HEAD.format(protocol=messages.PROTOCOL, most=messages.MAX_MESSAGE_BYTES // 2**20)]
    for title, union in (("Requests", messages.Request), ("Answers", messages.Answer)):
        parts += [f"## {title}\n", *(_message(kind) for kind in get_args(union))]
    parts.append(f"Codes of `Refused`: {', '.join(code(each) for each in codes)}.\n")
    parts += ["## Parts of a manifest\n", _message(messages.GroupPlaces), _message(messages.RecordPlace)]
    return "\n".join(parts)
