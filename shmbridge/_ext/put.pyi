from collections.abc import Callable
from typing import Any

import numpy as np

from shmbridge._ext.lane import Claim, LaneWriter

CHECKED_COLUMNS: tuple[str, ...]
LOGPROBS: tuple[str, ...]
WORTH_A_LOOK: tuple[str, ...]

class BeyondLayout(OverflowError): ...
class WrongLengths(ValueError): ...

class Form:
    name: str
    dtype: np.dtype[Any]
    number: int
    item_bytes: int
    kind: int
    per_token: bool
    per_record: bool
    finite: bool
    def __init__(
        self,
        name: str,
        number: int,
        kind: int,
        dtype: np.dtype[Any],
        *,
        per_token: bool,
        per_record: bool,
        finite: bool,
    ) -> None: ...

class PackedColumn:
    form: Form
    tag: int
    entries: int
    count: int
    rows: Any
    folds: PackedColumn | None
    def __init__(
        self,
        form: Form,
        *,
        tag: int = 0,
        entries: int = 0,
        count: int = 0,
        lengths: np.ndarray[Any, Any] | None = None,
        inner: np.ndarray[Any, Any] | None = None,
        keys: bytes | None = None,
        validity: np.ndarray[Any, Any] | None = None,
        rows: Any = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def lengths(self) -> np.ndarray[Any, Any] | None: ...
    @property
    def inner(self) -> np.ndarray[Any, Any] | None: ...
    @property
    def valid(self) -> np.ndarray[Any, Any] | None: ...

class BadValue(ValueError):
    column: str
    row: int
    position: int
    value: Any
    fault: str
    limit: Any
    def __init__(
        self, column: str, row: int, position: int, value: object, fault: str, limit: object = None
    ) -> None: ...

class LossyMasks(Exception): ...

LOWEST_LOGPROB: float
HIGHEST_LOGPROB: float

def recorded_logprobs(values: Any, none: float | None = None) -> np.ndarray[Any, np.dtype[np.float32]]: ...
def int32_of(row: list[Any] | tuple[Any, ...]) -> np.ndarray[Any, np.dtype[np.int32]] | None: ...
def pack_any(source: Any, to: np.ndarray[Any, Any]) -> int: ...
def copy_array(
    column: PackedColumn, row: int, source: np.ndarray[Any, Any], to: np.ndarray[Any, Any]
) -> None: ...
def row_of(lengths: np.ndarray[Any, Any], position: int) -> tuple[int, int]: ...

class Stamp:
    group_id: bytes
    group_size: int
    is_eval: bool
    def __init__(
        self, group_id: bytes, group_size: int, oldest: int, newest: int, is_eval: bool, said: int = 2
    ) -> None: ...

class RowSampler:
    every: int
    def __init__(self, every: int, first: int = 0) -> None: ...

class Plan:
    columns: list[PackedColumn]
    stamp: Stamp
    extent_bytes: int
    sequence: int | None
    done: bool
    source: Any
    def __init__(
        self,
        columns: list[PackedColumn],
        stamp: Stamp,
        rows: int,
        tokens: int,
        uneven: bool,
        env_id: int,
        source: Any = None,
        sampler: RowSampler | None = None,
    ) -> None: ...
    def become(self, other: Plan) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    def place(self, writer: LaneWriter) -> None: ...
    def put_into(self, writer: LaneWriter) -> bool: ...
    def begin(self, claim: Claim) -> None: ...
    def finish(self, claim: Claim) -> None: ...
    def view(self, memory: memoryview, column: PackedColumn) -> np.ndarray[Any, Any]: ...

class ColumnForms:
    def __init__(
        self,
        by_key: dict[str, Form],
        converter: Any,  # shmbridge.put.convert.Converter
        sampler: RowSampler | None = None,
        foreign: bool = False,
    ) -> None: ...
    def plan(self, group: Any, stamp: Stamp, source: Any = None, fold_masks: bool = True) -> Plan: ...
    def claimed(
        self, columns: list[PackedColumn], tokens: PackedColumn, score: PackedColumn | None, stamp: Stamp
    ) -> Plan: ...

class FastPut:
    groups: int
    ahead: int
    def __init__(
        self,
        forms: ColumnForms,
        writer: LaneWriter,
        producer_id: str,
        most_bytes: int,
        look: Callable[..., None],
    ) -> None: ...
    def put(self, group: Any, group_id: object, version: object) -> int | None: ...

def know_tensors(tensor: Any) -> None: ...

class ColumnMissing(Exception): ...

class RelayedPlan(Plan):
    def __init__(
        self,
        extent: bytes | bytearray | memoryview | np.ndarray[Any, Any],
        numbers: np.ndarray[Any, Any],
        table: bytes,
        words: tuple[int, int, int, int, int, int, int],
        versions: tuple[int, int],
        origin: tuple[int, int],
        requested_ns: int,
    ) -> None: ...
