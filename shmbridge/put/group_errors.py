"""The errors for a group that `put` refuses: column, row, numbers, hint."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shmbridge._ext.put import BadValue, PackedColumn
from shmbridge.errors import BadArgument, InvalidRecord
from shmbridge.other_names import column_meant, did_you_mean, nearest
from shmbridge.put import hints
from shmbridge.schema import ALIASES, Column, Columns, Kind
from shmbridge.shown import counted, is_tensor, kind_of, shown

_ARGUMENTS = {
    "policy_version": "put(group, policy_version=3)",
    "group_id": 'put(group, group_id="question-1")',
    "group_size": "put(group, group_size=8)",
    "split": 'put(group, split="eval")',
    "env_name": 'Producer(bridge, env_name="gsm8k")',
    "producer_id": 'Producer(bridge, producer_id="mine")',
}
_PADDING = ("attention_mask", "padding_mask")


def as_invalid(bad: BadValue, table: Columns, group: Any) -> InvalidRecord:
    """Returns the public error for a refused value, with the caller's names; `group` is None if unknown."""
    column, written = table.get(bad.column), _written(bad.column, group)
    kind = Kind.LIST if column is None else column.kind
    given = group.get(written) if isinstance(group, Mapping) else None
    type_name = "" if column is None else column.type_name
    what, hint = hints.explain(
        hints.Refused(bad.column, written, kind, type_name, bad.value, bad.reason, given)
    )
    place = f" row {bad.row}"
    whole_row = bad.reason.startswith(("is not one", "is not a row", "cannot become"))
    if kind in (Kind.LIST, Kind.LIST_LIST) and not whole_row:
        place += f" position {bad.position}"
    elif kind is Kind.MAP:
        place += _key(given, bad.row, bad.position)
    if bad.reason == "is not one value a row":
        place = ""
    return InvalidRecord(
        f"column {written!r}{place}: {what}", hint=hint, column=written, row=bad.row, position=bad.position
    )


def _key(rows: Any, row: int, position: int) -> str:
    """Returns ` key 'format'`, of the pair at a place of a map column."""
    try:
        return f" key {shown(list(dict(rows[row]))[position])}"
    except (TypeError, ValueError, LookupError):
        return ""


def as_written(wrong: InvalidRecord, group: Any) -> InvalidRecord:
    """Returns the error with the caller's name for the column."""
    written = _written(wrong.column, group)
    if written == wrong.column:
        return wrong
    named = re.compile(rf"(?<![\w.]){re.escape(wrong.column)}(?!\w)")
    message, hint = (named.sub(written, text) for text in (wrong.message, wrong.hint))
    return InvalidRecord(message, hint=hint, column=written, row=wrong.row, position=wrong.position)


def _written(column: str, group: Any) -> str:
    """Returns the key of a column in a group: its name, or an alias."""
    names = group if isinstance(group, Mapping) else getattr(getattr(group, "schema", None), "names", ())
    if not isinstance(names, Iterable) or column in names:
        return column
    return next((alias for alias, name in ALIASES.items() if name == column and alias in names), column)


# -- the whole group


def no_group(group: Any) -> InvalidRecord:
    """What was put is no group."""
    return InvalidRecord(
        f"a group is a mapping of columns or a pyarrow.RecordBatch, not {kind_of(group)}",
        hint=_as_group(group),
    )


def _as_group(group: Any) -> str:
    """Returns how something becomes a group."""
    library, name = type(group).__module__.split(".")[0], type(group).__name__
    if group is None:
        return "an environment that made no group puts none: skip None"
    if library == "pandas" and name == "DataFrame":
        return 'put(frame.to_dict("list"))'
    if library == "polars":
        return "put(frame.to_dict(as_series=False))"
    if library == "pyarrow" and name == "Table":
        return "put_many(table.to_batches())"
    if library == "datasets":
        return "put(dataset[:]): a dict of columns"
    if isinstance(group, (list, tuple)) and group and all(isinstance(row, Mapping) for row in group):
        if all(_is_table(row.get("tokens")) for row in group):
            return "put_many(groups), for several groups"
        return "columns of rows, not rows of columns: {name: [row[name] for row in rows] for name in rows[0]}"
    if isinstance(group, (list, tuple)) or hasattr(group, "dtype"):
        return 'name the column: put({"tokens": rows})'
    return 'put({"tokens": [[1, 2], [3]]})'


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and hasattr(value[0], "__len__")


def groups_of(groups: Any) -> Iterable[Any]:
    """Returns the groups given to put_many. Raises BadArgument for one group, or for what has no groups."""
    if isinstance(groups, Iterable) and not isinstance(groups, (Mapping, str, bytes)):
        with contextlib.suppress(TypeError):  # a 0-d array says that it is iterable
            return iter(groups)
    raise BadArgument(
        f"put_many takes groups, one after another, not {kind_of(groups)}",
        hint="put(group), or put_many([group])"
        if isinstance(groups, Mapping)
        else "put_many([first, second])",
    )


def no_tokens(group: Mapping[str, Any]) -> InvalidRecord:
    """The group has no column of tokens, or no rows."""
    if not group:
        return InvalidRecord("the group is empty: it has no columns", hint="skip the group before put")
    if "tokens" in group:
        rows = "is None" if group["tokens"] is None else "has no rows"
        return InvalidRecord(
            f"the group is empty: 'tokens' {rows}", hint="skip the group before put", column="tokens"
        )
    names = [key for key in group if isinstance(key, str)]
    if "prompt_ids" in names and "completion_ids" in names:
        hint = (
            "tokens=[prompt + completion for prompt, completion in zip(prompt_ids, completion_ids)], "
            "prompt_length=[len(prompt) for prompt in prompt_ids]"
        )
    elif meant := next((key for key in names if nearest(key, ("tokens",))), None):
        hint = f"rename {meant!r} to 'tokens'"
    else:
        hint = 'put({"tokens": [[1, 2], [3]], ...}): each row is a prompt and its response'
    has = ", ".join(shown(key) for key in list(group)[:8])
    return InvalidRecord(f"the group has no column 'tokens'; it has {has}", hint=hint, column="tokens")


def unknown(key: object, value: Any, table: Columns, rows: int) -> InvalidRecord:
    """An unknown column, or side data that is not one value per row."""
    if key in table:
        if isinstance(value, (list, tuple)):
            return _other_rows(str(key), len(value), rows, "")
        return InvalidRecord(
            f"column {key!r} is {kind_of(value)}, and has one value for each of {counted(rows, 'row')}",
            hint=f"{key}=[value, ...]",
            column=str(key),
        )
    if not isinstance(key, str):
        return InvalidRecord(
            f"unknown column {shown(key)}", hint="names of columns are text", column=str(key)
        )
    return InvalidRecord(f"unknown column {key!r}", hint=_known(key, value, table), column=key)


def _known(key: str, value: Any, table: Columns) -> str:
    """Returns what an unknown column is meant to be, or how it is declared."""
    if key in _ARGUMENTS:
        return f"it is an argument, no column: {_ARGUMENTS[key]}"
    if key in _PADDING:
        return "leave it out, and the padding too: rows have lengths of their own"
    if hint := did_you_mean(key, table):
        if column_meant(key) == "score":
            hint += " (one number a row; one per token is 'token_rewards')"
        return hint
    return f'declare it: Producer(schema=pyarrow.schema([("{key[:56]}", {_arrow_type(value)})]))'


def _arrow_type(value: Any) -> str:
    """Returns the pyarrow type that a column's values ask for."""
    depth = 0
    while isinstance(value, (list, tuple)) and value and depth < 3:
        value, depth = next((each for each in value if each is not None), None), depth + 1
    if isinstance(value, str):
        name = "pyarrow.utf8()"
    elif isinstance(value, bytes):
        name = "pyarrow.binary()"
    elif isinstance(value, Mapping):
        name = "pyarrow.map_(pyarrow.utf8(), pyarrow.float32())"
    elif isinstance(value, bool):
        name = "pyarrow.bool_()"
    else:
        name = "pyarrow.int32()" if isinstance(value, int) else "pyarrow.float32()"
    for _ in range(depth - 1):
        name = f"pyarrow.list_({name})"
    return name


def second(name: str, key: str) -> InvalidRecord:
    """A column given under both its name and an alias."""
    return InvalidRecord(
        f"column {name!r} is given twice: as {name!r} and as {key!r}", hint=f"leave out {key!r}", column=name
    )


# -- one column


def not_of_type(column: Column, wrong: Exception, hint: str = "") -> InvalidRecord:
    """A value that could not be converted, with the converter's message."""
    return InvalidRecord(
        f"column {column.name!r} is {column.type_name}: {_first_line(wrong)}",
        hint=hint or f"plain lists, arrays or CPU tensors: {hints.example(column)}",
        column=column.name,
    )


def _first_line(wrong: Exception) -> str:
    return (str(wrong).splitlines() or [type(wrong).__name__])[0][:160]


def not_on_cpu(column: Column, tensor: Any, row: int | None) -> InvalidRecord:
    """A tensor that the CPU cannot read as rows of numbers."""
    device, layout = str(tensor.device), str(tensor.layout).removeprefix("torch.")
    name = column.name
    if device == "meta":
        what, hint = "a tensor on device meta, which has no values", "put the tensor that was computed"
    elif device != "cpu":
        what = f"a tensor on {device}"
        hint = f"{name}.cpu()" if row is None else f"[row.cpu() for row in {name}]"
    else:
        what, hint = f"a tensor of layout {layout}", f"{name}.to_dense()"
    place = "" if row is None else f" row {row}"
    return InvalidRecord(
        f"column {name!r}{place} is {what}", hint=hint, column=name, row=-1 if row is None else row
    )


def not_rows(column: Column, value: Any, hint: str = "") -> InvalidRecord:
    """A value in place of rows."""
    one = {
        Kind.SCALAR: f"one {column.type_name}",
        Kind.LIST: f"one list of {column.dtype}",
        Kind.LIST_LIST: f"one list of lists of {column.dtype}",
        Kind.MAP: f"one dict of {column.dtype}",
        Kind.BYTES: "one text" if column.text else "one bytes",
    }[column.kind]
    hint = hint or hints.for_whole(column.name, column.name, column.kind, column.type_name, value)
    said = "a nested tensor" if is_tensor(value) and getattr(value, "is_nested", False) else _said(value)
    return InvalidRecord(
        f"column {column.name!r} takes {one} a row, and is {said}", hint=hint, column=column.name
    )


def _said(value: Any) -> str:
    kind, text = kind_of(value), shown(value)
    return text if kind in (text, "None") else f"{kind}: {text}"


def no_lengths(name: str, lengths: Any, rows: int | None = None) -> InvalidRecord:
    """Something in place of the lengths of a column's rows."""
    many = rows if rows is not None and 0 < rows <= 4 else 2
    return InvalidRecord(
        f"column {name!r}: lengths are whole numbers from 0, one a row, not {shown(lengths)}",
        hint=f"{name!r}: [{', '.join(['3'] * many)}]" if rows is not None else f"{name}=(flat array, [3, 2])",
        column=name,
    )


def other_sum(name: str, values: int, lengths: int) -> InvalidRecord:
    """A (flat array, lengths) pair that does not agree."""
    return InvalidRecord(
        f"column {name!r}: {counted(values, 'value')}, lengths add up to {lengths}",
        hint="a tuple of an array and whole numbers is (flat array, lengths): give two rows as a list, "
        "[first, second]",
        column=name,
    )


def no_json(name: str, row: int, wrong: Exception) -> InvalidRecord:
    """A value that cannot become JSON, in a column carried as JSON."""
    said = _first_line(wrong)
    if found := re.search(r"of type ([\w.]+)", said):
        kind = "a function" if "function" in found[1] else found[1]
        said = f"{kind} is no type of JSON"
    arrays = " (array.tolist(), tensor.tolist())" if "ndarray" in said or "Tensor" in said else ""
    return InvalidRecord(
        f"column {name!r} row {row} cannot become JSON: {said}",
        hint=f"pass str, finite numbers, lists and dicts{arrays}",
        column=name,
        row=row,
    )


def no_map(name: str, row: int, value: Any) -> InvalidRecord:
    """A row of a map column that is no mapping."""
    return InvalidRecord(
        f"column {name!r} row {row} is {_said(value)}, no dict",
        hint=f'one dict a row: {name}=[{{"format": 1.0}}]',
        column=name,
        row=row,
    )


def null_row(column: PackedColumn) -> InvalidRecord:
    """A None row in a column that needs every row."""
    row = -1 if column.valid is None else int(column.valid.argmin())
    hint = "leave the row out of every column"
    if column.name != "tokens":
        hint = f"give it {column.name} (-100 for each token that is not trained), or {hint}"
    return InvalidRecord(f"column {column.name!r} row {row} is None", hint=hint, column=column.name, row=row)


def scored_nothing(row: int) -> InvalidRecord:
    """A score for a row without tokens: it would count in its group's mean.

    Atropos accepts it, so foreign groups may have it.
    """
    return InvalidRecord(
        f"column 'tokens' row {row} has no tokens, and there is a score for it",
        hint="leave the row out of every column, or the group out if nothing was generated",
        column="tokens",
        row=row,
    )


def _other_rows(name: str, entries: int, rows: int, hint: str) -> InvalidRecord:
    hint = hint or hints.for_rows(name, entries, rows, -1, Kind.LIST)
    return InvalidRecord(
        f"column {name!r} has {counted(entries, 'row')}, tokens have {rows}", hint=hint, column=name
    )


def unequal(column: PackedColumn, tokens: PackedColumn, row: int) -> InvalidRecord:
    """A column that does not fit the tokens: in `row`, or, if negative, in the number of rows."""
    if column.form.per_record:
        return InvalidRecord(
            f"column {column.name!r} has {counted(column.entries, 'value')}, and has one per record",
            hint="pass a list of one",
            column=column.name,
        )
    if row < 0 or column.lengths is None or tokens.lengths is None:
        hint = hints.for_rows(
            column.name, column.entries, tokens.entries, tokens.count, Kind(column.form.kind)
        )
        return _other_rows(column.name, column.entries, tokens.entries, hint)
    count, wanted = int(column.lengths[row]), int(tokens.lengths[row])
    return InvalidRecord(
        f"column {column.name!r} row {row} has {counted(count, 'value')}, tokens have {wanted}",
        hint=hints.for_length(column.name, column.name, count, wanted),
        column=column.name,
        row=row,
    )
