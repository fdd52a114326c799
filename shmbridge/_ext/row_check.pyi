from typing import Any

import numpy as np

def check_of(column: str, values: np.ndarray[Any, Any]) -> int: ...
