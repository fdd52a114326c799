"""What a decoder refused, in the words of the one who wrote it: the key, the value, what is wanted."""

import json
import re
from typing import Any

from shmbridge.shown import shown

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_SIGNS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_EXPECTED = re.compile(r"Expected `([^`]+)`(?: ([<>]=?) (\S+))?")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


def wrong_value(message: str, document: Any, name: str = "") -> str:
    """Returns what a ValidationError of msgspec says, with the path first and the value in it.

    Args:
        message: the error's text.
        document: what was decoded or converted, as plain values.
        name: what the document itself is called; "" for a whole file or body.
    """
    text, _, path = message.partition(" - at ")
    inside = path.strip("`").removeprefix("$").removeprefix(".")
    where = f"{name}{inside if inside.startswith('[') or not name else '.' + inside}" if inside else name
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return f"{where}.{missing[1]} is missing" if where else f"{missing[1]} is missing"
    if not (found := _EXPECTED.match(text)):
        return f"{where}: {text[:1].lower()}{text[1:]}".replace("`", "")
    kinds = " or ".join(_KINDS.get(kind, kind) for kind in found[1].split(" | ") if kind != "null")
    limit = f", {_SIGNS[found[2]]} {found[3].removesuffix('.0')}" if found[2] else ""
    return f"{where or 'it'}: {_shown(_at(document, inside))} is not {kinds}{limit}"


def wrong_json(message: str, body: bytes | bytearray, name: str = "") -> str:
    """Returns what `wrong_value` does, of a JSON text; without the value where Python cannot read that text:
    a number of thousands of digits, brackets without end.
    """
    try:
        return wrong_value(message, json.loads(body), name)
    except (ValueError, LookupError, TypeError, RecursionError):
        text, _, path = message.partition(" - at ")
        where = f"{name}{path.strip('`').removeprefix('$')}".lstrip(".")
        return f"{where or 'it'}: {text[:1].lower()}{text[1:]}".replace("`", "")


def _at(document: Any, path: str) -> Any:
    """Returns the value at a path such as `rows[0].name`."""
    for place, key in _STEP.findall(path):
        document = document[int(place)] if place else document[key]
    return document


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shown(value)


def wrong_yaml(error: Exception) -> str:
    """Returns in one line where a text is no YAML, and why. `error`: PyYAML's, or UnicodeDecodeError."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem or mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(str(problem).split())}"
