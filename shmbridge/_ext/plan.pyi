from typing import Any

import numpy as np

from shmbridge._ext.column import PackedColumn
from shmbridge._ext.lane_writer import Claim, LaneWriter

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
