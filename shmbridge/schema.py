"""The columns of a trajectory: their types and meaning, and how Arrow schemas map to the column table of a
lane.

pyarrow is imported only when a pyarrow.Schema is asked for.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shmbridge._ext.put import HIGHEST_LOGPROB, LOWEST_LOGPROB, Form
from shmbridge._ext.put import LOGPROBS as LOGPROBS
from shmbridge._ext.put import recorded_logprobs as recorded_logprobs
from shmbridge.errors import SchemaMismatch, kind_of, shown

if TYPE_CHECKING:
    import pyarrow as pa


Split = Literal["train", "eval"]


class Kind(IntEnum):
    """The form of a column in a lane; the KIND_ constants of `_ext/c/layout.h`."""

    SCALAR = 0
    LIST = 1
    LIST_LIST = 2
    MAP = 3
    BYTES = 4


class Tag(IntEnum):
    """The content of a whole column; the TAG_ constants of `_ext/c/layout.h`."""

    VALUES = 0
    NULL = 1
    EMPTY_LIST = 2
    EMPTY_MAP = 3


# Index in this tuple = dtype code in the lane. Never reordered.
DTYPES: tuple[str, ...] = (
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bool",
)

# Python values that Atropos sends unchanged; carried as JSON text.
JSON_COLUMNS = frozenset({"messages", "overrides", "group_overrides", "generation_params", "images", "extra"})

# Index in this tuple = code in the column `finish_reason`. Never reordered.
FINISH_REASONS: tuple[str, ...] = ("stop", "length", "abort", "error")

ATROPOS_NO_LOGPROB = 1.0  # its mark of a log-probability that was not recorded; ours is NaN

# Other names under which `put` takes a column: Atropos' names.
ALIASES = {"scores": "score", "rewards": "token_rewards"}


def is_logprob(values: Any) -> Any:
    """Returns bool, shaped as `values`, an array or tensor: where `recorded_logprobs` would not give NaN.

    Never blocks; on the tensor's device.
    """
    return (values > LOWEST_LOGPROB) & (values <= HIGHEST_LOGPROB)


_PER_RECORD, _TEXT = 1, 2
_DEFINITION = struct.Struct("<56sBBBBI")
COLUMN_BYTES = _DEFINITION.size  # of one column in a lane's table


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, kind and dtype, and the checks of `put`."""

    name: str
    kind: Kind
    dtype: np.dtype[Any]
    text: bool = False
    per_record: bool = False  # one value per record, not one per row
    per_token: bool = False  # a row has as many values as tokens
    finite: bool = False  # NaN and infinity are refused

    @property
    def type_name(self) -> str:
        """The type as Arrow writes it."""
        if self.kind is Kind.BYTES:
            return "utf8" if self.text else "binary"
        return {
            Kind.SCALAR: f"{self.dtype}",
            Kind.LIST: f"list<{self.dtype}>",
            Kind.LIST_LIST: f"list<list<{self.dtype}>>",
            Kind.MAP: f"map<utf8, {self.dtype}>",
        }[self.kind]

    def encode(self) -> bytes:
        """Returns the `column_def` of layout.h."""
        flags = _PER_RECORD * self.per_record | _TEXT * self.text
        code = DTYPES.index(self.dtype.name)
        return _DEFINITION.pack(self.name.encode(), self.kind, code, self.dtype.itemsize, flags, 0)

    @classmethod
    def decode(cls, raw: bytes) -> "Column":
        """Returns a column from its `column_def`, completed by the standard column of that name."""
        if len(raw) != COLUMN_BYTES:
            raise SchemaMismatch(f"a column of {len(raw)} bytes in a table of columns of {COLUMN_BYTES}")
        name, kind, code, item_bytes, flags, _ = _DEFINITION.unpack(raw)
        text = name.rstrip(b"\0").decode("utf-8", "replace")
        known = (
            kind <= max(Kind)
            and code < len(DTYPES)
            and np.dtype(DTYPES[code]).itemsize == item_bytes
            and text
            and "\0" not in text
        )
        if not known or flags & ~(_PER_RECORD | _TEXT) or (kind == Kind.BYTES and DTYPES[code] != "uint8"):
            raise SchemaMismatch(
                f"column {text!r}: kind {kind}, dtype {code}, {item_bytes} bytes, flags {flags} is no type "
                "of this build"
            )
        column = cls(text, Kind(kind), np.dtype(DTYPES[code]), bool(flags & _TEXT), bool(flags & _PER_RECORD))
        standard = STANDARD.get(text)
        return standard if standard is not None and standard.same_type(column) else column

    def same_type(self, other: "Column") -> bool:
        """Returns whether both carry the same bytes for the same value."""
        mine = (self.kind, self.dtype, self.text, self.per_record)
        return mine == (other.kind, other.dtype, other.text, other.per_record)


class Columns(Mapping[str, Column]):
    """The ordered column table of a lane or a consumer; a column's number is its index here."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self._by_name = {column.name: column for column in columns}
        self.order: tuple[Column, ...] = tuple(self._by_name.values())
        self.number = {column.name: number for number, column in enumerate(self.order)}

    def __getitem__(self, name: str) -> Column:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self.order)

    def __repr__(self) -> str:
        own = [name for name in self if name not in STANDARD]
        return f"<Columns: {len(self)}{', own: ' + ', '.join(own) if own else ''}>"

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The facts that packing needs of each column, by name."""
        return {
            column.name: Form(
                column.name,
                number,
                column.kind,
                column.dtype,
                per_token=column.per_token,
                per_record=column.per_record,
                finite=column.finite,
            )
            for number, column in enumerate(self.order)
        }

    def encode(self) -> bytes:
        """Returns the column table in the form of a segment."""
        return b"".join(column.encode() for column in self.order)

    @classmethod
    def decode(cls, raw: bytes) -> "Columns":
        """Returns the table of a segment. Raises SchemaMismatch for unknown types or a repeated column."""
        columns = [
            Column.decode(raw[at : at + _DEFINITION.size]) for at in range(0, len(raw), _DEFINITION.size)
        ]
        table = cls(columns)
        if len(table) != len(columns):
            raise SchemaMismatch(
                f"{len(columns)} columns have {len(table)} names: "
                f"{', '.join(column.name for column in columns)}"
            )
        return table

    def check_standard(self) -> None:
        """Raises SchemaMismatch for a table without tokens, or with a standard column of another type."""
        if "tokens" not in self:
            raise SchemaMismatch(f"no column 'tokens' among {', '.join(self) or 'none'}")
        standard_columns().check_agrees(self, "in TRAJECTORY_SCHEMA", "there")

    def check_agrees(self, other: "Columns", here: str, there: str) -> None:
        """Raises SchemaMismatch if a column that both sides have is of two types."""
        for name, column in self.items():
            peer = other.get(name)
            if peer is not None and not peer.same_type(column):
                raise SchemaMismatch(
                    f"column {name!r} is {column.type_name} {here}, {peer.type_name} {there}",
                    hint="give one of them another name, or both the same type",
                )


def _columns() -> Iterator[Column]:
    def column(name: str, kind: Kind, dtype: str, **traits: bool) -> Column:
        return Column(name, kind, np.dtype(dtype), **traits)

    def text(name: str, *, per_record: bool = False) -> Column:
        return Column(name, Kind.BYTES, np.dtype("uint8"), text=True, per_record=per_record)

    def binary(name: str) -> Column:
        return Column(name, Kind.BYTES, np.dtype("uint8"))

    yield column("tokens", Kind.LIST, "int32", per_token=True)
    yield column("prompt_length", Kind.SCALAR, "int32")
    yield column("loss_mask", Kind.LIST, "uint8", per_token=True)
    yield column("masks", Kind.LIST, "int32", per_token=True)
    yield column("score", Kind.SCALAR, "float64", finite=True)
    yield column("raw_score", Kind.SCALAR, "float64", finite=True)
    yield column("advantages", Kind.LIST, "float32", per_token=True, finite=True)
    yield column("token_rewards", Kind.LIST, "float32", per_token=True, finite=True)
    yield column("step_rewards", Kind.LIST, "float32", finite=True)
    yield column("step_ends", Kind.LIST, "int32")  # exclusive: the index after the last token of that step
    yield column("inference_logprobs", Kind.LIST, "float32", per_token=True)
    yield column("ref_logprobs", Kind.LIST, "float32", per_token=True)
    yield column("token_versions", Kind.LIST, "int32", per_token=True)
    yield column("temperature", Kind.SCALAR, "float32")
    yield column("reward_components", Kind.MAP, "float32", finite=True)
    yield column("trace_spans", Kind.LIST, "int32")
    yield column("distill_token_ids", Kind.LIST_LIST, "int32", per_token=True)
    yield column("distill_logprobs", Kind.LIST_LIST, "float32", per_token=True)
    yield text("instance_id")
    yield column("repetition_id", Kind.SCALAR, "int32")
    yield column("row_index", Kind.SCALAR, "int32")
    yield column("is_last", Kind.SCALAR, "bool")
    yield column("finish_reason", Kind.SCALAR, "uint8")
    yield column("turn_ends", Kind.LIST, "int32")
    yield text("messages")
    yield text("overrides")
    yield text("group_overrides", per_record=True)
    yield text("generation_params", per_record=True)
    yield text("images")
    yield text("extra", per_record=True)
    yield binary("routed_experts")


STANDARD: dict[str, Column] = {column.name: column for column in _columns()}


def standard_columns() -> Columns:
    """Returns the columns of `shmbridge.TRAJECTORY_SCHEMA`."""
    return Columns(STANDARD.values())


def columns_of(schema: "pa.Schema | None") -> Columns:
    """Returns the standard columns, extended (or confirmed) by a user's Arrow schema.

    Raises SchemaMismatch for types no lane carries.
    """
    if schema is None:
        return standard_columns()
    if not (type(schema).__name__ == "Schema" and type(schema).__module__.startswith("pyarrow")):
        raise SchemaMismatch(
            f"schema= is {kind_of(schema)}, not a pyarrow.Schema",
            hint='schema=pyarrow.schema([("mine", pyarrow.int32())])',
        )
    _check_names(schema.names)
    mine = Columns(_column_of(field) for field in schema)
    standard_columns().check_agrees(mine, "in TRAJECTORY_SCHEMA", "in schema=")
    extra = [column for column in mine.order if column.name not in STANDARD]
    if len(STANDARD) + len(extra) > 256:
        raise SchemaMismatch(
            f"{len(extra)} extra columns; a lane has at most {256 - len(STANDARD)}",
            hint="carry them in one binary column",
        )
    return Columns([*STANDARD.values(), *extra])


def _check_names(names: list[str]) -> None:
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise SchemaMismatch(
            f"column {twice!r} stands twice in schema=", hint="give each field a name of its own"
        )


def _column_of(field: "pa.Field") -> Column:
    from pyarrow import types

    kind, value = Kind.SCALAR, field.type
    text = binary = False
    if types.is_map(value) and types.is_string(value.key_type):
        kind, value = Kind.MAP, value.item_type
    elif types.is_list(value) and types.is_list(value.value_type):
        kind, value = Kind.LIST_LIST, value.value_type.value_type
    elif types.is_list(value):
        kind, value = Kind.LIST, value.value_type
    elif types.is_string(value) or types.is_large_string(value):
        text = True
    elif types.is_binary(value) or types.is_large_binary(value):
        binary = True
    standard = STANDARD.get(field.name)
    if text or binary:
        per_record = standard.per_record if standard is not None else _says_per_record(field)
        return Column(
            _checked_name(field.name), Kind.BYTES, np.dtype("uint8"), text=text, per_record=per_record
        )
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(value), str(value))
    if name not in DTYPES or (kind is Kind.MAP and name != "float32"):
        raise SchemaMismatch(
            f"column {field.name!r}: no lane carries {field.type}",
            hint="numbers of fixed width, list<number>, list<list<number>>, map<utf8, float32>, utf8, binary",
        )
    column = Column(_checked_name(field.name), kind, np.dtype(name), per_record=_says_per_record(field))
    return standard if standard is not None and standard.same_type(column) else column


def _checked_name(name: str) -> str:
    if not 1 <= len(name.encode()) <= 56 or "\0" in name:
        raise SchemaMismatch(
            f"column name {shown(name)} has {len(name.encode())} bytes, allowed are 1 to 56",
            hint="choose a shorter name",
        )
    if name in ALIASES or name == "env_id":
        meant = f"Atropos' name of {ALIASES[name]!r}" if name in ALIASES else "the environment's number"
        raise SchemaMismatch(
            f"column {name!r} cannot be put: put takes that name as {meant}",
            hint=f"rename the column: 'my_{name}'",
        )
    return name


def _says_per_record(field: "pa.Field") -> bool:
    return bool(field.metadata) and field.metadata.get(b"per") == b"record"


@cache
def arrow_type(column: Column) -> "pa.DataType":
    """Returns the Arrow type of a column."""
    import pyarrow as pa

    if column.kind is Kind.BYTES:
        return pa.utf8() if column.text else pa.binary()
    value = pa.bool_() if column.dtype == np.bool_ else pa.from_numpy_dtype(column.dtype)
    if column.kind is Kind.LIST:
        return pa.list_(value)
    if column.kind is Kind.LIST_LIST:
        return pa.list_(pa.list_(value))
    return pa.map_(pa.utf8(), value) if column.kind is Kind.MAP else value


def arrow_field(column: Column) -> "pa.Field":
    """Returns the Arrow field of a column; its metadata marks one value per record."""
    import pyarrow as pa

    return pa.field(
        column.name, arrow_type(column), metadata={"per": "record"} if column.per_record else None
    )


@cache
def trajectory_schema() -> "pa.Schema":
    """Returns `shmbridge.TRAJECTORY_SCHEMA`."""
    import pyarrow as pa

    return pa.schema([arrow_field(column) for column in STANDARD.values()])
