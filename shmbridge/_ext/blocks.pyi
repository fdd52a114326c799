from typing import Any

import numpy as np

class Pool:
    spare_bytes: int
    keep_bytes: int
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]: ...
