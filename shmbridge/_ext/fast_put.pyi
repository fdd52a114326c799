from collections.abc import Callable
from typing import Any

from shmbridge._ext.column import Form, PackedColumn
from shmbridge._ext.lane_writer import LaneWriter
from shmbridge._ext.plan import Plan, RowSampler, Stamp

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
