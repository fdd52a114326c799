from typing import Any

import numpy as np

from shmbridge._ext.column import PackedColumn

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
