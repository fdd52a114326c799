"""What is wrong with a refused value, in words, and one next action that fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmbridge.other_names import nearest
from shmbridge.schema import FINISH_REASONS, Column, Kind
from shmbridge.shown import is_dtype, is_tensor, kind_of, shown

_REASONS = ", ".join(f'"{name}" ({code})' for code, name in enumerate(FINISH_REASONS))
_TOKENIZE = 'token ids come from the tokenizer: tokenizer(text)["input_ids"]'
_STEP_ENDS = (
    "step_ends are exclusive: tokens 0 to 2 and 3 to 6 end at [3, 7], one end for each of step_rewards"
)
_PROMPT_LENGTH = (
    "prompt_length counts the row's first tokens, those of its prompt, of prompt and response together; "
    "None: unknown"
)
_VERSION = "policy_version is the version when generation began, or (oldest, newest)"


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that `put` refuses: its column, the caller's name of it, what the whole column was."""

    column: str
    written: str
    kind: Kind
    type_name: str
    value: Any
    reason: str  # the packer's
    given: Any  # None: unknown


def explain(bad: Refused) -> tuple[str, str]:
    """Returns what is wrong with the value, and the hint."""
    reason, value = bad.reason, bad.value
    if "masked" in reason:
        whole = "" if bad.column in ("tokens", "masks") else ", or None for a whole row"
        return "the value is masked", f"give it one: {bad.written}.filled(0){whole}"
    if is_dtype(value):
        return f"{shown(value)} {reason}", _of_dtype(bad, reason.split()[-1])
    said = f"{shown(value)} {reason}"
    if "not finite" in reason:
        return said, _finite(bad)
    if reason.startswith("does not fit"):
        return _unfit(bad, reason.split()[-1])
    if reason in ("is not a row of numbers", "is not one-dimensional"):
        return _no_row(bad)
    if reason == "is not one value a row":
        if value == ():
            return f"{_number(bad)} is a single number, not one a row", f"{bad.written}=[{_number(bad)}]"
        return f"its shape is {value}, not one number a row", f"{bad.written}.reshape(-1)"
    return said, _other(bad)


def _other(bad: Refused) -> str:
    reason = bad.reason
    if bad.column == "prompt_length":
        return _PROMPT_LENGTH
    if reason.startswith("is negative"):
        return "pass tokens without padding, and what is not to be trained as 0 in loss_mask"
    if bad.column == "step_ends":
        return _STEP_ENDS
    if bad.column == "token_versions":
        return _VERSION
    if "JSON" in reason:
        return f"pass the value itself, or json.dumps(value): a text in {bad.written} is JSON already"
    if "Unicode" in reason:
        return "pass text that UTF-8 can carry; bytes belong in a binary column: Producer(schema=)"
    if reason == "is not a name":
        return f'keys are text: {bad.written}=[{{"{bad.value}": 1.0}}]'
    if "handed over" in reason:
        return "leave a group alone from the call of put until it returns"
    if reason == "is not utf8":
        return f"one text a row: {bad.written}=[str(value) for value in {bad.written}]"
    if reason == "is not binary":
        return (
            f"bytes for each row: {bad.written}=[row.tobytes()]"
            if _is_array(bad.value)
            else f"bytes for each row: {bad.written}=[bytes(row) for row in {bad.written}]"
        )
    return f"{bad.written} takes {bad.type_name}"


def _finite(bad: Refused) -> str:
    if bad.column == "advantages":
        return "equal scores have deviation 0: divide by (deviation + 1e-6), or leave advantages out"
    if type(bad.given).__module__.startswith("polars"):
        return f"{bad.written}.to_list(), which keeps None"
    if bad.kind is Kind.SCALAR:
        return f"find where the environment computes {bad.written}, or pass None for a row without one"
    if bad.kind is Kind.MAP:
        return "leave that key out of the row"
    return f"find where the environment computes {bad.written}, or pass None for a whole row"


def _of_dtype(bad: Refused, wanted: str) -> str:
    """Returns how a column of arrays of another dtype is converted."""
    kind = bad.value.kind
    if kind in "US" and bad.column == "tokens":
        return _TOKENIZE
    if kind == "U" and bad.column == "finish_reason":
        return f"{bad.written}.tolist()"
    if kind in "fiubUS" or (kind == "O" and wanted != "bool"):
        whole = " if all are whole numbers" if kind in "fO" and "int" in wanted else ""
        return f"{_cast(bad, wanted)}{whole}"
    return f"{bad.written} takes {bad.type_name}"


def _cast(bad: Refused, wanted: str) -> str:
    """Returns the expression that converts a column: an array, a tensor, a list of these, a flat array."""
    given, written = bad.given, bad.written
    if given is None:
        return f"cast it to {bad.type_name} first"
    to_tensor, to_array = f".to(torch.{wanted})", f'.astype("{wanted}")'
    if _is_array(given) or not isinstance(given, (list, tuple)):
        return f"{written}{to_tensor if is_tensor(given) else to_array}"
    if isinstance(given, tuple) and len(given) == 2 and _is_array(given[0]):
        return f"{written}=(flat{to_array}, lengths)"
    tensors = any(map(is_tensor, given))
    return f"[row{to_tensor if tensors else to_array} for row in {written}]"


def _is_array(value: object) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _number(bad: Refused) -> str:
    """Returns the number of a 0-d array or tensor, as written in a list."""
    try:
        return shown(bad.given.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return "1.0"


def _unfit(bad: Refused, dtype: str) -> tuple[str, str]:
    """Of a single value that the column's type does not hold."""
    value, written = bad.value, bad.written
    if bad.column == "finish_reason":
        near = nearest(value, FINISH_REASONS, 1) if isinstance(value, str) else []
        said = f"{shown(value)} is no reason"
        return said, f'did you mean "{near[0]}"?' if near else f"the reasons are {_REASONS}"
    if value is None:
        return f"None is no {dtype}", "None stands for a whole row, not for one value of it"
    if isinstance(value, (str, bytes)):
        return f"{shown(value)} is {'text' if isinstance(value, str) else 'bytes'}, no {dtype}", _of_text(
            bad, dtype
        )
    if isinstance(value, (list, tuple)):
        return f"{shown(value)} is {kind_of(value)}, no {dtype}", _too_deep(bad)
    if _is_array(value):
        return f"{shown(value)} is no {dtype}", _too_deep(bad)
    if isinstance(value, Mapping):
        return (
            f"{shown(value)} is {kind_of(value)}, no {dtype}",
            f"take the number out of it: {_example(bad)}",
        )
    if dtype == "bool":
        return f"{shown(value)} is no bool", f"{written}={_each(bad, 'bool')}"
    if "int" in dtype and isinstance(value, float):
        return f"{value!r} is a float, no {dtype}", f"{written}={_each(bad, 'int')}"
    if "int" in dtype and isinstance(value, int):
        bits = int("".join(filter(str.isdigit, dtype)))
        low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if bad.column == "loss_mask" and value < 0:
            return (
                f"{value} does not fit {dtype}",
                "loss_mask is 1 where trained, else 0; rows with -100 are 'masks'",
            )
        if bad.column == "tokens":
            return (
                f"{shown(value)} does not fit {dtype}",
                f"a token id is 0 to {high}: is it the tokenizer's?",
            )
        return f"{shown(value)} does not fit {dtype}", f"{dtype} holds {low} to {high}"
    return f"{shown(value)} is no {dtype}", _example(bad)


def _of_text(bad: Refused, dtype: str) -> str:
    """Of text in place of a number."""
    text = bad.value.strip() if isinstance(bad.value, str) else ""
    convert = "int" if "int" in dtype else "float"
    if text.lstrip("+-").replace(".", "", 1).isdigit() and dtype != "bool":
        return f"{bad.written}={_each(bad, convert)}"
    if bad.column == "tokens":
        return _TOKENIZE
    return f"{'one number a row' if bad.kind is Kind.SCALAR else 'numbers'}: {_example(bad)}"


def _each(bad: Refused, convert: str) -> str:
    """Returns the expression that converts each value of a column of lists."""
    if bad.kind is Kind.SCALAR:
        return f"[{convert}(value) for value in {bad.written}]"
    if bad.kind is Kind.MAP:
        return f'[{{"name": {convert}(value)}}]'
    return f"[[{convert}(value) for value in row] for row in {bad.written}]"


def _too_deep(bad: Refused) -> str:
    if bad.kind is Kind.SCALAR:
        return f"one number a row: {_example(bad)}"
    return f"one level of lists too many: {_example(bad)}"


def _example(bad: Refused) -> str:
    """Returns a column as it would be right."""
    one, two = (
        ("True", "False")
        if "bool" in bad.type_name
        else ("1", "2")
        if "int" in bad.type_name
        else ("1.0", "0.0")
    )
    rows = {
        Kind.SCALAR: f"[{one}, {two}]",
        Kind.LIST: f"[[{one}, {two}], [{one}]]",
        Kind.LIST_LIST: f"[[[{one}, {two}], [{one}]]]",
        Kind.MAP: f'[{{"name": {one}}}]',
        Kind.BYTES: '["a", "b"]' if bad.type_name == "utf8" else '[b"a", b"b"]',
    }[bad.kind]
    return f"{bad.written}={rows}"


def _no_row(bad: Refused) -> tuple[str, str]:
    """Of something in place of a row."""
    value, written, given = bad.value, bad.written, bad.given
    if isinstance(value, (str, bytes)):
        hint = _TOKENIZE if bad.column == "tokens" else f"one list of numbers a row: {_example(bad)}"
        return f"{shown(value)} is {'text' if isinstance(value, str) else 'bytes'}, no row of numbers", hint
    if not _is_single(value):
        if not hasattr(value, "__len__"):
            return f"{kind_of(value)} is no row of numbers", f"[list(row) for row in {written}]"
        if _is_array(value):
            return f"{shown(value)} is no row of numbers", f"a row is one list or 1-D array: {_example(bad)}"
        hint = f"a row is one list or 1-D array: {_example(bad)}"
        return f"{kind_of(value)} is no row of numbers", hint
    number = shown(value.item() if _is_array(value) else value)
    said = f"{number} is one number, no row of them"
    if bad.kind is Kind.LIST_LIST:
        return said, f"one list per token: {_example(bad)}"
    if bad.column == "token_rewards":
        return said, f"one value per token: {written}=[[0.0, 0.0, 1.0]]; one number a row is score=[1.0]"
    whole = _as_one_row(given)
    if bad.column == "tokens":
        return said, f"one list a row, also for a single one: {written}=[{whole}]"
    return said, (
        f"one list a row: {written}=[{whole}] for a single row; one number for a whole row is repeated: "
        f"[[value] * len(row) for value, row in zip({written}, tokens)]"
    )


def _is_single(value: object) -> bool:
    """Returns whether it is one number, in whatever form."""
    if _is_array(value):
        return tuple(value.shape) == ()  # type: ignore[attr-defined]
    return isinstance(value, (int, float)) or hasattr(value, "__index__")


def _as_one_row(given: Any) -> str:
    """Returns the column's flat values as a row."""
    try:
        values = [value.item() if hasattr(value, "item") else value for value in list(given)[:5]]
    except (TypeError, ValueError, RuntimeError):
        values = []
    if not values or not all(isinstance(value, (int, float)) for value in values):
        return "[1, 2]"
    more = ", ..." if len(given) > 4 else ""
    return f"[{', '.join(shown(value) for value in values[:4])}{more}]"


def example(column: Column) -> str:
    """Returns a column as it would be right."""
    return _example(Refused(column.name, column.name, column.kind, column.type_name, None, "", None))


def for_whole(column: str, written: str, kind: Kind, type_name: str, value: object) -> str:
    """Returns the hint for something without rows in place of a whole column."""
    bad = Refused(column, written, kind, type_name, value, "", None)
    if isinstance(value, (str, bytes)):
        if column == "tokens":
            return _TOKENIZE
        if kind is Kind.BYTES or column == "finish_reason":
            return f"one a row: {written}=[{shown(value)}]"
        return f"one number a row: {_example(bad)}" if kind is Kind.SCALAR else _example(bad)
    if isinstance(value, Mapping):
        if kind is Kind.MAP:
            return f"one dict a row: {written}=[{shown(value)}]"
        return f"list({written}.values()), if these are the rows; else {_example(bad)}"
    if isinstance(value, (int, float)) or _is_array(value):
        if kind is Kind.SCALAR:
            return f"one value a row: {written}=[{shown(value)}]"
        return f"one list a row: {written}=[[{shown(value)}]]"
    if hasattr(value, "__iter__") or hasattr(value, "__next__"):
        return f"{written}=list({written})"
    return f"one entry a row: {_example(bad)}"


def for_rows(written: str, entries: int, rows: int, tokens: int, kind: Kind) -> str:
    """Returns the hint for a column of `entries` rows beside `rows` rows of `tokens` tokens in all."""
    if kind is Kind.SCALAR and rows == 1 and entries == tokens:
        return f"{written} is one number a row; one per token is 'token_rewards'"
    if entries < rows:
        missing = f"one entry for each row of tokens: {rows - entries} missing"
        return missing if written == "masks" else f"{missing}; None for a row without {written}"
    return f"one entry for each row of tokens: {entries - rows} too many, or rows of tokens are missing"


def for_length(column: str, written: str, count: int, wanted: int) -> str:
    """Returns the hint for a row of `count` values beside `wanted` tokens."""
    if column == "token_rewards" and count == 1:
        return f"one value per token: {written}=[[0.0, 0.0, 1.0]]; one number a row is score=[1.0]"
    if count < wanted:
        zero = "0.0" if column not in ("loss_mask", "masks", "token_versions", "distill_token_ids") else "0"
        zero = {
            "masks": "-100",
            "token_versions": "-1",
            "distill_token_ids": "[]",
            "distill_logprobs": "[]",
        }.get(column, zero)
        return (
            "one value per token, prompt included: for the response alone put "
            f"[{zero}] * {wanted - count} in front"
        )
    return f"one value per token, prompt included: {count - wanted} too many, or tokens are missing"
