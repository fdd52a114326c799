from collections.abc import Callable
from typing import Any, Protocol

from shmbridge._ext.column import Form, PackedColumn
from shmbridge._ext.lane_writer import LaneWriter
from shmbridge._ext.plan import Plan, RowSampler, Stamp

class _Converter(Protocol):
    table: Any
    @property
    def errors(self) -> Any: ...
    def mapping(self, group: Any) -> dict[str, Any]: ...
    def convert(self, form: Form, value: Any, group: Any, rows: int) -> Any: ...
    def loss_mask(self, masks: Any) -> Any: ...
    def extra(self, extra: Any, unknown: Any) -> dict[str, Any]: ...
    def env_id(self, value: Any) -> int: ...
    def note_uneven(self, wrong: Any) -> None: ...

class ColumnForms:
    def __init__(
        self,
        by_key: dict[str, Form],
        converter: _Converter,
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
