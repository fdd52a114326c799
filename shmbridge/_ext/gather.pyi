from typing import Any, Self

import numpy as np

from shmbridge._ext.blocks import Pool

MOST_TOKENS: int

class TooManyTokens(ValueError): ...

class Gather:
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    cu_seqlens: np.ndarray[Any, np.dtype[np.int32]]
    group_index: np.ndarray[Any, np.dtype[np.int32]]
    rows: int
    tokens: int
    longest: int
    shape: tuple[int, ...]
    uneven: list[np.ndarray[Any, np.dtype[np.bool_]]]
    def __init__(self, groups: list[list[Any]], padded: bool, pool: Pool) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def columns(self) -> list[tuple[Any, int]]: ...
    def add(
        self,
        name: bytes,
        kind: int,
        dtype: np.dtype[Any],
        *,
        per_record: bool = False,
        per_token: bool = False,
    ) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], Any, Any, Any]: ...
    def copy(self) -> None: ...

def positions(
    lengths: np.ndarray[Any, Any], padded: bool, pool: Pool
) -> np.ndarray[Any, np.dtype[np.int32]]: ...
