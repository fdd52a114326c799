"""What people wrote, and what is wrong with it: the values of a YAML file as they stand there; what a decoder
refused, by the key, the value and what is wanted. PyYAML is imported on first use.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
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
    return f"{where or 'it'}: {shown_value(_at(document, inside))} is not {kinds}{limit}"


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


def shown_value(value: Any) -> str:
    """Returns a value of a document as an error shows it: as it is written, cut if it is long or nested."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value) if isinstance(value, Written) else shown(value)


# --- YAML -------------------------------------------------------------------------------------------------

_MOST_DEEP = 50
_MOST_SHOWN = 40
_MOST_LISTED = 20
_MOST_DIGITS = 4000  # Python's int() refuses 4,300
_NOTHING = re.compile(r"(?!)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PREFIX = "tag:yaml.org,2002:"
_EXPONENTS = (  # YAML 1.1 parses 1e-6 as text
    f"{_PREFIX}float",
    re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class Written:
    """A number, boolean or null of a YAML file, and its text there: 1.1 may be written 1.10, false as no.

    What YAML 1.1 takes for a number to another base, or for a date, has its text as its value.
    """

    value: Any
    text: str

    def __repr__(self) -> str:
        text = self.text or "null"
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def read_yaml(text: str | bytes, forbidden: re.Pattern[str] | None = None) -> Any:
    """Returns the one document of a YAML text: dicts with text as keys, lists, texts, `Written` for all else.

    Raises ValueError, in one line with the place, for what is not YAML, for a key that is given twice, for
    nesting deeper than 50 levels or of an anchor in itself, and for a text that has what is `forbidden`.
    """
    import yaml

    try:
        loader = _loader()(text)
        tree = loader.get_single_node()
        if wrong := list(_faults(tree, "", (), set(), forbidden or _NOTHING)):
            raise ValueError(listed(wrong))
        return None if tree is None else loader.construct_document(tree)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {_wrong_yaml(error)}") from error


def listed(wrong: list[str]) -> str:
    """Returns what is wrong with a file in one line, and how much more there is of it."""
    more = len(wrong) - _MOST_LISTED
    return "; ".join(wrong[:_MOST_LISTED]) + (f"; and {more:,} more" if more > 0 else "")


def plain(document: Any) -> Any:
    """Returns what `read_yaml` did with values alone, without their texts."""
    return _plain(document, {})


def _plain(value: Any, made: dict[int, Any]) -> Any:
    """Makes each list and dict once, however many aliases it has."""
    if not isinstance(value, (dict, list)):
        return value.value if isinstance(value, Written) else value
    if id(value) not in made:
        made[id(value)] = (
            {key: _plain(each, made) for key, each in value.items()}
            if isinstance(value, dict)
            else [_plain(each, made) for each in value]
        )
    return made[id(value)]


def _faults(
    node: Any, path: str, above: tuple[int, ...], seen: set[int], forbidden: re.Pattern[str]
) -> Iterator[str]:
    """Yields one line per fault that PyYAML's tree of a file shows and its values do not."""
    if node is None or (id(node) in seen and id(node) not in above):  # an alias of what was looked at
        return
    line = f"line {node.start_mark.line + 1}"
    if id(node) in above:
        yield f"{line}: {path} contains itself"
        return
    seen.add(id(node))
    if node.id == "scalar":
        if found := forbidden.search(node.value):
            yield f"{line}: the character {found[0]!a} in {path or 'the text'}"
        return
    lines: dict[str, int] = {}
    for index, each in enumerate(node.value):
        key, inner = each if node.id == "mapping" else (None, each)
        where = f"{path}[{index}]"
        if key is not None:
            name, number = str(key.value), key.start_mark.line + 1
            where = f"{path}.{name}" if path else name
            if key.id != "scalar":
                yield f"line {number}: a key in {path or 'the file'} is not text"
                continue
            if found := forbidden.search(name):
                yield f"line {number}: the character {found[0]!a} in a key in {path or 'the file'}"
            if name in lines:
                yield f"{where} is given twice, in lines {lines[name]} and {number}"
            lines[name] = number
        yield from _faults(inner, where, (*above, id(node)), seen, forbidden)


def _written(loader: Any, node: Any) -> Written:
    """Returns what a plain scalar stands for."""
    text, kind = loader.construct_scalar(node), node.tag.removeprefix(_PREFIX)
    value: Any = text
    digits = text.replace("_", "")
    if kind == "null":
        value = None
    elif kind == "bool":
        value = loader.bool_values.get(text.lower(), text)
    elif kind == "int" and len(digits) < _MOST_DIGITS and re.fullmatch(r"[-+]?\d+", digits):
        value = int(digits)
    elif kind == "float" and _NUMBER.fullmatch(digits):
        value = float(re.sub(r"\.(inf|nan)$", r"\1", digits.lower()))
    return Written(value, text)


@cache
def _loader() -> Any:
    """Returns a SafeLoader of `Written` values."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > _MOST_DEEP:
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, f"nested deeper than {_MOST_DEEP} levels", mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if node.id != "mapping":
                what = f"expected a mapping, but found a {node.id}"
                raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
            self.flatten_mapping(node)
            return {key.value: self.construct_object(inner, deep) for key, inner in node.value}

    Loader.add_implicit_resolver(*_EXPONENTS)
    for kind in ("null", "bool", "int", "float", "timestamp"):
        Loader.add_constructor(f"{_PREFIX}{kind}", _written)
    return Loader


def write_yaml(document: Any) -> str:
    """Returns plain values as YAML that `read_yaml` reads as the same ones."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        pass

    Dumper.add_implicit_resolver(*_EXPONENTS)
    return str(yaml.dump(document, Dumper=Dumper, sort_keys=False))


def _wrong_yaml(error: Exception) -> str:
    """Returns PyYAML's error in one line, with its place."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem or mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(str(problem).split())}"
