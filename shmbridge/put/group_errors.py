"""The errors for a group that `put` refuses: column, row, numbers, hint."""

import difflib
from collections.abc import Mapping
from typing import Any

from shmbridge._ext.column import PackedColumn
from shmbridge._ext.pack import BadValue
from shmbridge.errors import InvalidRecord
from shmbridge.put import hints
from shmbridge.schema import ALIASES, Column, Columns


def as_invalid(bad: BadValue, table: Columns, group: Any) -> InvalidRecord:
    """Returns the public error for a refused value, with the caller's names; `group` is None if unknown."""
    column, written = table.get(bad.column), _written(bad.column, group)
    return InvalidRecord(
        f"column {written!r} row {bad.row} position {bad.position}: {bad.value!r:.80} {bad.reason}",
        hint=hints.for_value(
            bad.column, written, "" if column is None else column.type_name, bad.value, bad.reason
        ),
        column=written,
        row=bad.row,
        position=bad.position,
    )


def as_written(wrong: InvalidRecord, group: Any) -> InvalidRecord:
    """Returns the error with the caller's name for the column."""
    written = _written(wrong.column, group)
    if written == wrong.column:
        return wrong
    message, hint = (text.replace(wrong.column, written) for text in (wrong.message, wrong.hint))
    return InvalidRecord(message, hint=hint, column=written, row=wrong.row, position=wrong.position)


def _written(column: str, group: Any) -> str:
    """Returns the key of a column in a group: its name, or an alias."""
    names = group if isinstance(group, Mapping) else getattr(getattr(group, "schema", None), "names", ())
    if column in names:
        return column
    return next((alias for alias, name in ALIASES.items() if name == column and alias in names), column)


# -- the whole group


def no_tokens(group: Mapping[str, Any]) -> InvalidRecord:
    """The group has no column of tokens, or no rows."""
    if not group or "tokens" in group:
        return InvalidRecord(
            "the group is empty: `tokens` has no rows", hint="skip the group before put", column="tokens"
        )
    meant = next((key for key in group if isinstance(key, str) and hints.column_meant(key) == "tokens"), None)
    has = ", ".join(map(repr, list(group)[:8]))
    example = 'put({"tokens": [[1, 2], [3]], ...}): each row is a prompt and its response'
    hint = f"rename {meant!r} to 'tokens'" if meant else example
    return InvalidRecord(f"the group has no column 'tokens'; it has {has}", hint=hint, column="tokens")


def unknown(key: object, value: Any, table: Columns, rows: int) -> InvalidRecord:
    """An unknown column, or side data that is not one value per row."""
    if key in table:
        count = len(value) if hasattr(value, "__len__") else "no"
        return InvalidRecord(f"column {key!r} has {count} rows, tokens have {rows}", column=str(key))
    meant = hints.column_meant(str(key))
    near = [meant] if meant else difflib.get_close_matches(str(key), table, n=3)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?"
        if near
        else "declare it: Producer(schema=pyarrow.schema([...]))"
    )
    if meant == "score":
        hint += " (one number a row; one per token is 'token_rewards')"
    return InvalidRecord(f"unknown column {key!r}", hint=hint, column=str(key))


def second(name: str, key: str) -> InvalidRecord:
    """A column given under both its name and an alias."""
    return InvalidRecord(f"column {name!r} is given twice: as {name!r} and as {key!r}", column=name)


# -- one column


def not_of_type(column: Column, wrong: Exception, hint: str = "") -> InvalidRecord:
    """A value that could not be converted, with the converter's message."""
    return InvalidRecord(
        f"column {column.name!r} is {column.type_name}: {wrong}", hint=hint, column=column.name
    )


def not_rows(column: Column, what: str, hint: str) -> InvalidRecord:
    """A value in place of rows."""
    return InvalidRecord(
        f"column {column.name!r} takes rows of {column.type_name}, not a {what}",
        hint=hint,
        column=column.name,
    )


def other_sum(name: str, values: int, lengths: int) -> InvalidRecord:
    """A (flat array, lengths) pair that does not agree."""
    return InvalidRecord(
        f"column {name!r}: {values} values, lengths add up to {lengths}",
        hint="a tuple of an array and whole numbers is (flat array, lengths): give two rows as a list, "
        "[first, second]",
        column=name,
    )


def no_json(name: str, row: int, wrong: Exception) -> InvalidRecord:
    """A value that cannot become JSON, in a column carried as JSON."""
    return InvalidRecord(
        f"column {name!r} row {row} cannot become JSON: {wrong}",
        hint="pass str, finite numbers, lists and dicts",
        column=name,
        row=row,
    )


def null_row(column: PackedColumn) -> InvalidRecord:
    """A None row in a column that needs every row."""
    row = -1 if column.valid is None else int(column.valid.argmin())
    return InvalidRecord(f"column {column.name!r} row {row} is None", column=column.name, row=row)


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


def unequal(column: PackedColumn, tokens: PackedColumn, row: int) -> InvalidRecord:
    """A column that does not fit the tokens: in `row`, or, if negative, in the number of rows."""
    if column.form.per_record:
        return InvalidRecord(
            f"column {column.name!r} has {column.entries} values, and has one per record",
            hint="pass a list of one",
            column=column.name,
        )
    if row < 0 or column.lengths is None or tokens.lengths is None:
        return InvalidRecord(
            f"column {column.name!r} has {column.entries} rows, tokens have {tokens.entries}",
            column=column.name,
        )
    count, wanted = column.lengths[row], tokens.lengths[row]
    return InvalidRecord(
        f"column {column.name!r} row {row} has {count} values, tokens have {wanted}",
        hint="every per-token column has one value per token, prompt included",
        column=column.name,
        row=row,
    )
