from typing import Any

import numpy as np

CHECKED_COLUMNS: tuple[str, ...]

class Form:
    name: str
    dtype: np.dtype[Any]
    number: int
    item_bytes: int
    kind: int
    per_token: bool
    per_record: bool
    finite: bool
    def __init__(
        self,
        name: str,
        number: int,
        kind: int,
        dtype: np.dtype[Any],
        *,
        per_token: bool,
        per_record: bool,
        finite: bool,
    ) -> None: ...

class Column:
    form: Form
    tag: int
    entries: int
    count: int
    rows: Any
    folds: Column | None
    def __init__(
        self,
        form: Form,
        *,
        tag: int = 0,
        entries: int = 0,
        count: int = 0,
        lengths: np.ndarray[Any, Any] | None = None,
        inner: np.ndarray[Any, Any] | None = None,
        keys: bytes | None = None,
        validity: np.ndarray[Any, Any] | None = None,
        rows: Any = None,
        folds: Column | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def lengths(self) -> np.ndarray[Any, Any] | None: ...
    @property
    def inner(self) -> np.ndarray[Any, Any] | None: ...
    @property
    def valid(self) -> np.ndarray[Any, Any] | None: ...

def row_lengths(rows: list[Any]) -> np.ndarray[Any, np.dtype[np.uint32]]: ...
