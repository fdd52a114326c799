from collections.abc import Sequence
from typing import Any

import numpy as np

from shmbridge._ext.plan import Plan, Stamp

class RelayedPlan(Plan):
    def __init__(
        self,
        extent: bytes | memoryview | np.ndarray[Any, Any],
        table: bytes,
        numbers: Sequence[int],
        stamp: Stamp,
        words: tuple[int, int, int, int, int, int, int],
        origin: tuple[int, int],
        requested_ns: int,
    ) -> None: ...
