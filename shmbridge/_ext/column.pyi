from typing import Any

import numpy as np

CHECKED_COLUMNS: tuple[str, ...]
LOGPROBS: tuple[str, ...]
WORTH_A_LOOK: tuple[str, ...]

class BeyondLayout(OverflowError): ...
class WrongLengths(ValueError): ...

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

class PackedColumn:
    form: Form
    tag: int
    entries: int
    count: int
    rows: Any
    folds: PackedColumn | None
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
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def lengths(self) -> np.ndarray[Any, Any] | None: ...
    @property
    def inner(self) -> np.ndarray[Any, Any] | None: ...
    @property
    def valid(self) -> np.ndarray[Any, Any] | None: ...
