from collections.abc import Iterable
from typing import Any

import numpy as np

def check_of(column: str, values: np.ndarray[Any, Any]) -> int: ...
def checksum(pieces: Iterable[Any], seed: int = 0) -> int: ...
