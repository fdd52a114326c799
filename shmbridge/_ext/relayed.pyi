from typing import Any

import numpy as np

from shmbridge._ext.plan import Plan

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
