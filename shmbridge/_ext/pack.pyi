from collections.abc import Sequence
from typing import Any

import numpy as np

from shmbridge._ext.ring import LaneWriter

class BadValue(ValueError):
    column: str
    row: int
    position: int
    value: object
    reason: str
    def __init__(self, column: str, row: int, position: int, value: object, reason: str) -> None: ...

class LossyMasks(Exception): ...

def row_lengths(rows: list[Any]) -> np.ndarray[Any, np.dtype[np.uint32]]: ...
def copy_array(column: Column, row: int, source: np.ndarray[Any, Any], to: np.ndarray[Any, Any]) -> None: ...

class Column:
    name: str
    dtype: np.dtype[Any]
    index: int
    kind: int
    tag: int
    entries: int
    lengths: np.ndarray[Any, Any] | None
    inner: np.ndarray[Any, Any] | None
    keys: bytes | None
    validity: np.ndarray[Any, Any] | None
    values_bytes: int
    rows: Any
    tokens: Any
    finite: bool
    values_at: int
    def __init__(
        self,
        name: str,
        index: int,
        kind: int,
        dtype: np.dtype[Any],
        *,
        tag: int = 0,
        entries: int = 0,
        count: int = 0,
        lengths: np.ndarray[Any, Any] | None = None,
        inner: np.ndarray[Any, Any] | None = None,
        keys: bytes | None = None,
        validity: np.ndarray[Any, Any] | None = None,
        rows: Any = None,
        tokens: Sequence[Any] | None = None,
        finite: bool = False,
    ) -> None: ...

class Plan:
    columns: list[Column]
    group_id: bytes
    index_bytes: int
    extent_bytes: int
    def __init__(self, columns: list[Column], group_id: bytes) -> None: ...
    def write(self, writer: LaneWriter) -> None: ...
    def check_values(self, memory: memoryview) -> None: ...
    def view(self, memory: memoryview, column: Column) -> np.ndarray[Any, Any]: ...
