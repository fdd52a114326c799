from collections.abc import Iterable
from typing import Any

import numpy as np
from typing_extensions import Buffer

def check_of(column: str, values: np.ndarray[Any, Any]) -> int: ...
def checksum(pieces: Iterable[Buffer], seed: int = 0) -> int: ...
