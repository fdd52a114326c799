"""Converts the uncommon values that `put` takes, and has the words for those that it refuses.

ColumnForms (_ext/forms.pxi) has the grammar of a group and calls a Converter, column by column. Packers and
planner raise BadValue: a fault, its column, row, position and value, and the limit that it broke. Here each
fault has one sentence and one example, which a column or a kind of columns may have of its own.
"""

import contextlib
import json
import logging
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from shmbridge._ext.put import WORTH_A_LOOK, BadValue, Form, PackedColumn, int32_of, row_of
from shmbridge.errors import BadArgument, InvalidRecord, did_you_mean, is_tensor, kind_of, nearest, shown
from shmbridge.schema import ALIASES, FINISH_REASONS, JSON_COLUMNS, STANDARD, Column, Columns, Kind, Tag

log = logging.getLogger("shmbridge.producer")

# {column} is "column 'score'", {row} has its row, {at} its position or key as well. {name} is the caller's
# name of it, {example} the column as it would be right.
_FAULTS = {
    # a value
    "type": "{at} is {value}, not {dtype} -> pass {dtype} values, as in {example}",
    "none": "{at} is None, not {dtype} -> None stands for a whole row, not for one value of it",
    "range": "{at} is {value}, which does not fit {dtype} -> pass {dtype} values, as in {example}",
    "negative": "{at} is {value}, below 0 -> leave padding out; loss_mask is 0 for what is not trained",
    "finite": "{at} is {value}, which is not finite -> find where the environment computes {name}, or pass "
    "None for a row without one",
    "masked": "{at} is masked -> replace masked values: array.filled(0), or None for a whole row",
    "beyond": "{at} is {value}, and the row has {limit} tokens -> {example}",
    "order": "{at} is {value}, not after {limit} -> {example}",
    "count": "{row} has {value} ends for {limit} step_rewards -> {example}",
    "older": "{at} is {value}, older than policy_version {limit} -> {example}",
    "newer": "{at} is {value}, newer than policy_version {limit} -> {example}",
    "key": "{row} has the key {value}, which is not text -> write keys as text, as in {example}",
    "unicode": "{at} is not Unicode: {value} -> bytes belong in a binary column: Producer(schema=)",
    # a row
    "dtype": "{row} is {value}, which cannot become {dtype} -> convert it: array.astype('{dtype}')",
    "row": "{row} is {value}, not a list or 1-D array -> pass one list for each row, as in {example}",
    "dict": "{row} is {value}, not a dict -> pass one dict for each row, as in {example}",
    "not json": "{row} is {value}, not JSON: {limit} -> pass the value itself, or json.dumps(value)",
    "json": "{row} cannot become JSON: {limit} -> pass str, finite numbers, lists and dicts; array.tolist()",
    "device": "{row} is a {limit} tensor on {value} -> pass computed values: tensor.cpu(), .to_dense()",
    "null row": "{row} is None -> leave the row out of every column",
    "scored": "{row} has no tokens, and a score -> leave the row out of every column",
    "length": "{row} has length {value}, tokens have {limit} -> one value per token, prompt included",
    "resized": "{row} has length {value}, and had {limit} before -> leave a group alone until put returns",
    # a column
    "rows": "{column} is {value}, not {one} a row -> one entry for each row, as in {example}",
    "library": "{column} is {value}, not {one} a row -> {name}.{limit}",
    "converter": "{column} is not {type}: {limit} -> plain lists, arrays or CPU tensors: {example}",
    "shape": "{column} has shape {value}, not one value a row -> one value for each row, as in {example}",
    "lengths": "{column} has lengths {value}, not whole numbers from 0 -> {name}=(flat array, [3, 2])",
    "sum": "{column} has {value} values, and lengths for {limit} -> a tuple of an array and whole numbers is "
    "(flat array, lengths): give two rows as a list, [first, second]",
    "row count": "{column} has length {value}, tokens have {limit} -> one entry for each row, or None",
    "per record": "{column} has length {value}, and is one per record -> {name}=[value]",
    "side": "{column} is {value}, not one value for each row, {limit} in all -> {name}=[value, ...]",
    "twice": "{column} is also given as {value} -> leave out {value}",
    "unknown": "unknown column {key} -> declare it, say as a list of floats: "
    "Producer(schema=pyarrow.schema([({key}, pyarrow.list_(pyarrow.float32()))]))",
    "env_id": "env_id is {value}, not an environment's number -> the number that registering it gave, from 0",
    # a group
    "group": "a group is a dict of columns or a RecordBatch, not {kind} -> put({{'tokens': [[1, 2], [3]]}})",
    "no columns": "the group is empty: it has no columns -> skip the group before put",
    "no rows": "the group is empty: 'tokens' is {value} -> skip the group before put",
    "no tokens": "no column 'tokens' among {value} -> add tokens: a prompt and its response in each row",
    # what goes with it
    "split": "split={value} is not 'train' or 'eval' -> split='eval', or leave it out for 'train'",
    "group_id": "group_id {value} is not text of at most {limit} bytes of UTF-8 -> a short id, "
    "group_id='question-1', and the rest in extra={{...}}",
    "group_size": "group_size={value} is not a number of rows -> group_size=8: the rows of all fragments",
    "policy_version": "policy_version={value} is not a version, or (oldest, newest) -> policy_version=3, "
    "from 0, or (2, 5); leave it out for producer.policy_version",
    "small group": "group_size={value} is less than the rows, {limit} -> leave it out for a whole group",
    "other size": "group {limit[0]!r} has group_size={value}, and {limit[1]} in an earlier fragment -> one "
    "group_size for all fragments, and a group_id of its own for each group",
    "full group": "group {limit[0]!r} has {limit[1]} rows with these, and group_size={value} -> group_size= "
    "is the number of rows of all fragments together",
    # a claim
    "claim rows": "rows={value} is not a whole number from 1 -> rows=8",
    "claim": "a claim's lengths are {kind}, not a mapping -> claim(2, {{'tokens': [3, 5], 'score': None}})",
    "claim type": "{column} is {type}, which cannot be claimed -> put the group, or leave {name!r} out",
    "claim lengths": "{column} has lengths {value}, not whole numbers -> one for each row: {name!r}: [3, 5]",
    "claim count": "{column} has {value} for lengths, and rows={limit} -> one length for each row",
    "unwritten": "{column} was claimed and never written: its memory holds values of earlier records -> "
    "write slot[{name!r}][:] = ... in the block, or leave {name!r} out of lengths=",
}
_REASONS = ", ".join(f"'{name}' ({code})" for code, name in enumerate(FINISH_REASONS))
_ENDS = "step_ends are exclusive: tokens 0 to 2 and 3 to 6 end at [3, 7], one end for each of step_rewards"
_PROMPT = "prompt_length counts the row's first tokens, those of its prompt; None or -1: unknown"
_VERSION = "policy_version is the version when generation began, or (oldest, newest)"
_PER_TOKEN = "one value per token: {name}=[[0.0, 0.0, 1.0]]; one number a row is score=[1.0]"
_PADDING = "leave it out, and the padding too: rows have lengths of their own"
# The examples of a column, of a kind of columns, or of a library.
_EXAMPLES = {
    ("tokens", "type"): "token ids are whole numbers: {name}=tokenizer(texts)['input_ids']",
    ("tokens", "range"): "a token id is 0 to 2147483647: is it the tokenizer's?",
    ("finish_reason", "type"): f"the reasons are {_REASONS}",
    ("finish_reason", "rows"): f"one for each row; the reasons are {_REASONS}",
    ("finish_reason", "range"): f"the reasons are {_REASONS}",
    ("loss_mask", "range"): "loss_mask is 1 where trained, else 0; rows with -100 are 'masks'",
    ("advantages", "finite"): "equal scores have deviation 0: divide by (deviation + 1e-6)",
    ("MAP", "finite"): "leave that key out of the row",
    ("prompt_length", "negative"): _PROMPT,
    ("prompt_length", "beyond"): _PROMPT,
    ("step_ends", "beyond"): _ENDS,
    ("step_ends", "order"): _ENDS,
    ("step_ends", "count"): _ENDS,
    ("token_versions", "older"): _VERSION,
    ("token_versions", "newer"): _VERSION,
    ("token_rewards", "row"): _PER_TOKEN,
    ("token_rewards", "length"): _PER_TOKEN,
    ("masks", "null row"): "give it masks, -100 for each token that is not trained, or leave the row out",
    ("masks", "length"): "one value per token, prompt included: -100 where nothing is trained",
    ("loss_mask", "length"): "one value per token, prompt included: 0 where nothing is trained",
    ("token_versions", "length"): "one version per token, prompt included: -1 where none is known",
    ("LIST_LIST", "length"): "one list per token, prompt included: [] where there is nothing",
    ("score", "row count"): "one number for each row of tokens; one per token is 'token_rewards'",
    ("masks", "row count"): "one entry for each row of tokens",
    ("reward", "unknown"): "did you mean 'score'? (one number a row; one per token is 'token_rewards')",
    ("attention_mask", "unknown"): _PADDING,
    ("padding_mask", "unknown"): _PADDING,
    ("policy_version", "unknown"): "it is an argument: put(group, policy_version=3)",
    ("group_id", "unknown"): "it is an argument: put(group, group_id='question-1')",
    ("group_size", "unknown"): "it is an argument: put(group, group_size=8)",
    ("split", "unknown"): "it is an argument: put(group, split='eval')",
    ("env_name", "unknown"): "it is an argument: Producer(bridge, env_name='gsm8k')",
    ("producer_id", "unknown"): "it is an argument: Producer(bridge, producer_id='mine')",
    ("prompt_ids", "no tokens"): "tokens=[prompt + completion, ...], prompt_length=[len(prompt), ...]",
    ("None", "group"): "skip None: an environment that made no group puts none",
    ("a list", "group"): "put({{'tokens': [row, ...], 'score': [...]}}), or put_many(groups) for several",
    ("a pandas DataFrame", "group"): "put(frame.to_dict('list'))",
    ("a polars DataFrame", "group"): "put(frame.to_dict(as_series=False))",
    ("a pyarrow Table", "group"): "put_many(table.to_batches())",
    ("a datasets Dataset", "group"): "put(dataset[:]), a dict of columns",
}
_ROWS = {  # of each kind: what one row is, and rows as they would be right
    Kind.SCALAR: ("one {dtype}", "[{one}, {two}]"),
    Kind.LIST: ("one list of {dtype}", "[[{one}, {two}], [{one}]]"),
    Kind.LIST_LIST: ("one list of lists of {dtype}", "[[[{one}, {two}], [{one}]]]"),
    Kind.MAP: ("one dict of {dtype}", "[{{'name': {one}}}]"),
    Kind.BYTES: ("one {dtype}", "[{one}, {two}]"),
}
_NUMBERS = {"b": ("True", "False"), "f": ("1.0", "0.0"), "utf8": ("'a'", "'b'"), "binary": ("b'a'", "b'b'")}


def refused(fault: str, value: Any = None, limit: Any = None) -> InvalidRecord:
    """Returns the error for what goes with a group, such as an argument."""
    return as_invalid(BadValue("", -1, -1, value, fault, limit))


def as_invalid(bad: BadValue, table: Mapping[str, Column] = STANDARD, group: Any = None) -> InvalidRecord:
    """Returns the public error of a fault, with the name that `group` has for the column; None: unknown."""
    name, column = _written(bad.column, group), table.get(bad.column)
    words = {"name": name, "key": shown(name), "value": shown(bad.value), "kind": kind_of(bad.value)}
    words |= {"limit": bad.limit, "column": f"column {name!r}"}
    words["row"] = words["column"] + (f" row {bad.row}" if bad.row >= 0 else "")
    words["at"] = words["row"]
    if column is not None:
        words |= _of_type(name, column)
        if column.kind in (Kind.LIST, Kind.LIST_LIST):
            words["at"] += f" position {bad.position}" if bad.position >= 0 else ""
        elif column.kind is Kind.MAP:
            with contextlib.suppress(TypeError, ValueError, LookupError):
                words["at"] += f" key {shown(list(dict(group[name][bad.row]))[bad.position])}"
    sentence, example = _FAULTS[bad.fault].split(" -> ")
    for what in (words["kind"], column.kind.name if column is not None else "", bad.column):
        example = _EXAMPLES.get((what, bad.fault), example)
    message, hint = sentence.format(**words), _nearly(bad, table) or example.format(**words)
    return InvalidRecord(message, hint=hint, column=str(name), row=bad.row, position=bad.position)


def _of_type(name: str, column: Column) -> dict[str, str]:
    """Returns a column's type in words, and the column as it would be right."""
    dtype = column.type_name if column.kind is Kind.BYTES else str(column.dtype)
    one, two = _NUMBERS.get(dtype) or _NUMBERS.get(column.dtype.kind) or ("1", "2")
    row, rows = (text.format(dtype=dtype, one=one, two=two) for text in _ROWS[column.kind])
    return {"dtype": dtype, "type": column.type_name, "one": row, "example": f"{name}={rows}"}


def _nearly(bad: BadValue, table: Mapping[str, Column]) -> str:
    """Returns the hint for a name that is nearly a column's; "" if none is near."""
    if bad.fault == "no tokens":
        near = next((key for key in bad.value if nearest(key, ("tokens",))), None)
        return _EXAMPLES.get((near, bad.fault), f"rename {near!r} to 'tokens'") if near else ""
    if bad.fault != "unknown" or (bad.column, bad.fault) in _EXAMPLES:
        return ""
    return did_you_mean(bad.column, table) if isinstance(bad.column, str) else "names of columns are text"


def _written(column: str, group: Any) -> str:
    """Returns the key of a column in a group: its name, or an alias."""
    names = group if isinstance(group, Mapping) else getattr(getattr(group, "schema", None), "names", ())
    if not isinstance(names, Iterable) or column in names:
        return column
    return next((alias for alias, name in ALIASES.items() if name == column and alias in names), column)


def groups_of(groups: Any) -> Iterable[Any]:
    """Returns the groups given to put_many. Raises BadArgument for one group, or for what has no groups."""
    if isinstance(groups, Iterable) and not isinstance(groups, (Mapping, str, bytes)):
        with contextlib.suppress(TypeError):  # a 0-d array has __iter__
            return iter(groups)
    raise BadArgument(
        f"put_many takes groups, not {kind_of(groups)}", hint="put(group), or put_many([group])"
    )


_WORTH_A_LOOK = frozenset(WORTH_A_LOOK)
_NO_MASK = "neither loss_mask, masks nor prompt_length: learners train nothing of it -> write one of these"
_GREEDY = (
    "a temperature below 1e-5: its log-probabilities mean nothing -> sample at the temperature of training"
)
_CUT = (
    "top_p, top_k or min_p: learners' ratios to its log-probabilities are biased -> sample with top_p=1 alone"
)
_IMAGES = "images, which the learner of shmbridge refuses -> see its option --ignore-images"


class PutNotices:
    """Warnings in a producer's log, once each, about groups that learners cannot train with as they are.

    Never blocks, never raises; for the producer's thread.
    """

    def __init__(self, env_name: str) -> None:
        self._env_name, self._logged = env_name, set[str]()

    def warn_untrainable(self, group: Any, *, nulls: bool = True) -> None:
        """Checks a group that `put` takes; `nulls=False`: no row of it is None."""
        if type(group) is not dict and not isinstance(group, Mapping):
            # Arrow: check only which columns there are, not their values.
            group = dict.fromkeys(group.schema.names, True)
        masks = group.get("loss_mask"), group.get("masks")
        if _lacks(masks[0], nulls) and _lacks(masks[1], nulls) and _lacks(group.get("prompt_length"), nulls):
            self._warn_once(_NO_MASK)
        if _WORTH_A_LOOK.isdisjoint(group):
            return
        if any(_is(value, below=1e-5) for value in _settings(group, "temperature")):
            self._warn_once(_GREEDY)
        if any(_is(value, below=1.0) for value in _settings(group, "top_p")) or any(
            _is(value, above=0) for key in ("top_k", "min_p") for value in _settings(group, key)
        ):
            self._warn_once(_CUT)
        if any(map(_is_filled, _rows(group.get("images")))):
            self._warn_once(_IMAGES)

    def warn_uneven(self, name: str, numbers: str) -> None:
        """Logs a column of a foreign group that does not fit its tokens, with the numbers of the first."""
        self._warn_once(
            f"a column {name!r} that learners leave out where it does not fit its tokens", numbers
        )

    def _warn_once(self, what: str, first: str = "") -> None:
        if what not in self._logged:
            self._logged.add(what)
            details = f"; first here: {first}" if first else ""
            name = self._env_name or "unnamed"
            log.warning("environment %s: a group has %s%s; logged once", name, what, details)


def _lacks(value: Any, nulls: bool) -> bool:
    """Returns whether some row has no value in a column."""
    if type(value) is list:
        return not value or (nulls and any(row is None for row in value))
    return value is None


def _rows(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, (list, tuple)) else ()


def _is_filled(value: Any) -> bool:
    return value is not None and not (isinstance(value, (str, list, tuple, dict)) and len(value) == 0)


def _settings(group: Mapping[str, Any], key: str) -> Iterator[Any]:
    """Yields a group's values of a sampling setting, of its column and of all of Atropos' settings."""
    if key == "temperature":
        yield from _rows(group.get(key))
    rows = _rows(group.get("overrides"))
    for settings in (group.get("generation_params"), group.get("group_overrides"), *rows):
        if isinstance(settings, Mapping):
            yield settings.get(key)


def _is(value: Any, below: float = float("-inf"), above: float = float("inf")) -> bool:
    return isinstance(value, (int, float)) and (value < below or value > above)


Array = np.ndarray[Any, Any]
_ATROPOS_MARKS = ("masks", "scores")
_CANNOT = (TypeError, ValueError, OverflowError, AttributeError, RuntimeError)  # RuntimeError is torch's


class Converter:
    """Converts uncommon values of a group to common ones. Keeps nothing of a group; for the producer's
    thread.

    Whatever cannot be converted is a BadValue.

    Args:
        table: the lane's columns.
        foreign: whether the groups come from Atropos, and may have what Atropos accepts.
        notices: logs rows that do not fit; None: nothing is logged.
    """

    def __init__(self, table: Columns, foreign: bool = False, notices: PutNotices | None = None) -> None:
        self.table, self._foreign, self._notices = table, foreign, notices

    def mapping(self, group: Any) -> dict[str, Any]:
        """Returns the columns of a group that is not a dict."""
        if type(group).__name__ == "RecordBatch" and type(group).__module__.startswith("pyarrow"):
            return with_reason_codes(_from_arrow(group, self.table))
        if isinstance(group, Mapping):
            return with_reason_codes(dict(group.items()))
        raise BadValue("", -1, -1, group, "group")

    def convert(self, form: Form, value: Any, group: Any, rows: int) -> Any:
        """Returns a value in a form that C reads, or its column; None for side data not one value a row."""
        column = self.table[form.name]
        if _is_empty(value):
            return PackedColumn(form, tag=Tag.EMPTY_MAP if isinstance(value, Mapping) else Tag.EMPTY_LIST)
        if column.name in JSON_COLUMNS:
            of_atropos = isinstance(group, Mapping) and any(mark in group for mark in _ATROPOS_MARKS)
            return self._json(form, column, value, rows, self._foreign or of_atropos)
        if is_nested(value):
            raise BadValue(form.name, -1, -1, value, "library", "unbind()")
        if column.kind is not Kind.SCALAR and type(value).__module__.split(".")[0] == "pyarrow":
            raise BadValue(form.name, -1, -1, value, "library", "to_pylist()")
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
            raise BadValue(form.name, -1, -1, value, "rows")
        _check_readable(column, value, -1)
        try:
            if column.kind is Kind.MAP:
                return _maps(form, column, value)
            if column.kind is Kind.BYTES:
                return _texts(form, column, value)
            return _COMMON[column.kind](column, value)
        except BadValue:
            raise
        except _CANNOT as wrong:
            raise BadValue(form.name, -1, -1, value, "converter", _first_line(wrong)) from wrong

    def loss_mask(self, masks: Any) -> Any:
        """Returns the loss_mask that Atropos' masks stand for."""
        rows = [masks[0]] if is_flat(masks) else masks
        try:
            trained = [None if row is None else np.not_equal(row, -100) for row in rows]
        except (TypeError, ValueError, RuntimeError) as wrong:
            raise BadValue("masks", -1, -1, masks, "converter", _first_line(wrong)) from wrong
        return (trained[0], masks[1]) if is_flat(masks) else trained

    def extra(self, extra: Any, unknown: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `extra` with the unknown keys of a foreign group added."""
        if not isinstance(extra, Mapping):
            extra = {} if extra is None else {"extra": extra}
        return {**extra, **unknown}

    def env_id(self, value: Any) -> int:
        """Returns the environment's number."""
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number < 1 << 31:
            raise BadValue("env_id", -1, -1, value, "env_id")
        return number

    def uneven(self, column: PackedColumn, tokens: PackedColumn, row: int) -> None:
        """Refuses a column that does not fit the tokens, in `row` or, if negative, in its number of rows; one
        of a foreign group is logged.
        """
        fault, value, limit = "row count", column.entries, tokens.entries
        if column.form.per_record:
            fault = "per record"
        elif row >= 0 and column.lengths is not None and tokens.lengths is not None:
            fault, value, limit = "length", int(column.lengths[row]), int(tokens.lengths[row])
        bad = BadValue(column.name, max(row, -1), -1, value, fault, limit)
        if column.form.per_record or not self._foreign:
            raise bad
        if self._notices is not None:
            self._notices.warn_uneven(column.name, as_invalid(bad, self.table).message)

    def _json(
        self, form: Form, column: Column, value: Any, rows: int, of_atropos: bool
    ) -> PackedColumn | None:
        if column.per_record:
            return _texts(form, column, [self._as_text(column.name, 0, value, of_atropos)])
        values = list(value) if isinstance(value, (list, tuple)) else []
        if len(values) != rows and not self._foreign:
            if isinstance(value, (list, tuple)):
                raise BadValue(column.name, -1, -1, len(values), "row count", rows)
            raise BadValue(column.name, -1, -1, value, "side", rows)
        if len(values) != rows:
            return None
        texts: list[bytes | str | None] = [None] * rows
        for row, each in enumerate(values):
            if each is not None:
                texts[row] = self._as_text(column.name, row, each, of_atropos)
        return _texts(form, column, texts)

    def _as_text(self, name: str, row: int, value: Any, of_atropos: bool) -> bytes | str:
        """Returns a value as JSON. A string is JSON already, but a value in an Atropos column."""
        if isinstance(value, (str, bytes)) and not of_atropos:
            return _checked_json(name, row, value)
        try:
            if self._foreign:
                return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
            text = msgspec.json.encode(value)
            if b"null" in text and not _is_finite(value):  # NaN has no JSON: msgspec writes null
                raise ValueError("NaN and infinity have no JSON")
            return text
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise BadValue(name, row, -1, value, "json", _first_line(wrong)) from None


def first_masked(value: Any) -> int | None:
    """Returns the position of the first masked value of a NumPy masked array; None if there is none."""
    if not (isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value)):
        return None
    return int(np.ma.getmaskarray(value).reshape(-1).argmax())


def _first_line(wrong: Exception) -> str:
    return (str(wrong).splitlines() or [type(wrong).__name__])[0][:160]


def checked_lengths(name: str, lengths: Any, fault: str = "lengths") -> Array:
    """Returns a caller's row lengths as uint32. Raises BadValue with that fault if they are not lengths."""
    try:
        found = np.asarray(lengths)
    except _CANNOT:
        raise BadValue(name, -1, -1, lengths, fault) from None
    no_lengths = first_masked(lengths) is not None or found.ndim != 1 or found.dtype.kind not in "iu"
    if no_lengths or (found.size and (found.min() < 0 or found.max() > np.iinfo(np.uint32).max)):
        raise BadValue(name, -1, -1, lengths, fault)
    return found.astype(np.uint32)


def with_reason_codes(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a mapping with the names of its finish reasons, if it has such, as their codes."""
    reasons = group.get("finish_reason")
    if isinstance(reasons, (list, tuple)) and any(isinstance(reason, str) for reason in reasons):
        return {**group, "finish_reason": [_reason_code(reason) for reason in reasons]}
    return group


def _reason_code(reason: Any) -> Any:
    return FINISH_REASONS.index(reason) if isinstance(reason, str) and reason in FINISH_REASONS else reason


def is_nested(value: Any) -> bool:
    """Returns whether it is a nested torch tensor, which has no shape."""
    return getattr(value, "is_nested", False) is True


def is_flat(value: Any) -> bool:
    """Returns whether it is (flat array, lengths): a 1-D array and whole numbers, not two float arrays."""
    if not (
        isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "dtype") and np.ndim(value[0]) == 1
    ):
        return False
    return not hasattr(value[1], "dtype") or "int" in str(value[1].dtype)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping)) and len(value) == 0


def _array(value: Any) -> Array:
    """Returns a tensor or array-like as an array that C reads; bfloat16 widens to float32."""
    if type(value).__module__.split(".")[0] == "torch":
        value = value.detach()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.asarray(value)
    if array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
        return array
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _check_readable(column: Column, value: Any, row: int) -> None:
    """Raises BadValue for a tensor whose numbers are not in the CPU's memory, one after another."""
    if is_tensor(value):
        device, layout = str(value.device), str(value.layout).removeprefix("torch.")
        if (device, layout) != ("cpu", "strided"):
            raise BadValue(column.name, row, -1, device, "device", layout)


def _check_mask(column: Column, row: int, position: int | None) -> None:
    if position is not None:
        raise BadValue(column.name, row, position, np.ma.masked, "masked")


def _row(column: Column, number: int, row: Any) -> Any:
    """Returns one row of a list column: a list, or a 1-D array."""
    if isinstance(row, (list, tuple)):
        return row
    if isinstance(row, (str, bytes, Mapping)) or not (hasattr(row, "__array__") or hasattr(row, "__len__")):
        raise BadValue(column.name, number, 0, row, "row")
    _check_readable(column, row, number)
    array = _array(row)
    if array.ndim != 1:
        raise BadValue(column.name, number, 0, row, "row")
    _check_mask(column, number, first_masked(row))
    return array


def _scalars(column: Column, value: Any) -> Any:
    if not hasattr(value, "dtype"):
        return list(value)
    flat = _array(value)
    if flat.ndim != 1:
        raise BadValue(column.name, 0, 0, flat.shape, "shape")
    if (place := first_masked(value)) is not None:
        _check_mask(column, place, 0)
    return flat


def _lists(column: Column, value: Any) -> Any:
    if not is_flat(value):
        return [None if row is None else _row(column, number, row) for number, row in enumerate(list(value))]
    flat, lengths = _array(value[0]), checked_lengths(column.name, value[1])
    if int(lengths.sum()) != len(flat):
        raise BadValue(column.name, -1, -1, len(flat), "sum", int(lengths.sum()))
    if (place := first_masked(value[0])) is not None:
        _check_mask(column, *row_of(lengths, place))
    return flat, lengths


def _list_lists(column: Column, value: Any) -> Any:
    found: list[list[Any] | None] = []
    for number, row in enumerate(list(value)):
        found.append(None if row is None else [_row(column, number, each) for each in row])
        if row is not None and len(row) != len(found[-1] or ()):
            raise ValueError(f"row {number} has not as many lists as it says")
    return found


_COMMON = {Kind.SCALAR: _scalars, Kind.LIST: _lists, Kind.LIST_LIST: _list_lists}


def _maps(form: Form, column: Column, value: Any) -> PackedColumn:
    rows = list(value)
    pairs = [_pairs(column, number, row) for number, row in enumerate(rows)]
    keys, values = [], []
    for number, row in enumerate(pairs):
        for key, each in row.items():
            if not isinstance(key, str):
                raise BadValue(column.name, number, 0, key, "key")
            keys.append(_utf8(column, number, key))
            values.append(each)
    return PackedColumn(
        form,
        entries=len(rows),
        count=len(values),
        lengths=_lengths(pairs),
        inner=_lengths(keys),
        keys=b"".join(keys),
        validity=_validity(rows),
        rows=[values],
    )


def _pairs(column: Column, number: int, row: Any) -> dict[Any, Any]:
    try:
        return {} if row is None else dict(row)
    except (TypeError, ValueError):
        raise BadValue(column.name, number, -1, row, "dict") from None


def _texts(form: Form, column: Column, value: Iterable[Any]) -> PackedColumn:
    """Returns a column of text or bytes, one a row; None is null."""
    rows = list(value)
    raw = [b"" if row is None else _utf8(column, number, row) for number, row in enumerate(rows)]
    whole = b"".join(raw)
    return PackedColumn(
        form, entries=len(raw), count=len(whole), lengths=_lengths(raw), validity=_validity(rows), rows=whole
    )


def _lengths(rows: list[Any]) -> Array:
    return np.fromiter(map(len, rows), np.uint32, len(rows))


def _validity(rows: list[Any]) -> Array | None:
    valid = np.fromiter((row is not None for row in rows), np.uint8, len(rows))
    return None if valid.all() else valid


def _utf8(column: Column, row: int, value: Any) -> bytes:
    if not isinstance(value, (str, bytes, bytearray, memoryview)):
        raise BadValue(column.name, row, 0, value, "type")
    try:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        if column.text and not isinstance(value, str):
            raw.decode()
        return raw
    except UnicodeError as wrong:
        at = wrong.start if isinstance(wrong, UnicodeEncodeError | UnicodeDecodeError) else 0
        raise BadValue(column.name, row, at, value, "unicode") from None


def _checked_json(name: str, row: int, text: bytes | str) -> bytes | str:
    """Returns JSON text after checking that a reader can decode it."""
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as wrong:
        raise BadValue(name, row, 0, text, "not json", wrong) from None
    return text


def _is_finite(value: Any) -> bool:
    """Returns whether no number in it, at any depth, is NaN or infinite."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _from_arrow(batch: Any, table: Columns) -> dict[str, Any]:
    """Returns a RecordBatch as a mapping: numbers from its buffers, everything else as Python values."""
    import pyarrow as pa

    group: dict[str, Any] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if array.null_count == len(array) and len(array):
            group[name] = None
        elif len(array) and name in table and table[name].per_record:  # repeated in every row
            value = next(value for value in array.to_pylist() if value is not None)
            group[name] = (
                value if name in JSON_COLUMNS else [dict(value) if pa.types.is_map(array.type) else value]
            )
        elif pa.types.is_map(array.type):
            group[name] = [None if row is None else dict(row) for row in array.to_pylist()]
        elif isinstance(array, pa.ListArray) and _is_plain(array):
            group[name] = (array.flatten().to_numpy(zero_copy_only=False), np.diff(array.offsets.to_numpy()))
        elif pa.types.is_primitive(array.type) and array.null_count == 0:
            group[name] = array.to_numpy(zero_copy_only=False)
        else:
            group[name] = array.to_pylist()
    return group


def _is_plain(lists: Any) -> bool:
    """Returns whether its rows are numbers without nulls; to_numpy would turn nulls into NaN."""
    import pyarrow as pa

    return not (pa.types.is_nested(lists.type.value_type) or lists.null_count or lists.flatten().null_count)


def token_array(row: Any) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """int32 of token ids in any form; a list's are copied. None if they are no token ids."""
    if isinstance(row, (list, tuple)):
        return int32_of(row)
    try:
        array = np.asarray(row)
    except (TypeError, ValueError, RuntimeError):
        return None
    limits = np.iinfo(np.int32)
    if (
        array.ndim != 1
        or array.dtype.kind not in "iu"
        or (array.size and not limits.min <= array.min() <= array.max() <= limits.max)
    ):
        return None
    return array.astype(np.int32)
