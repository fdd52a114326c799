from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shmbridge._ext.lane import Lease

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

_Array = np.ndarray[Any, Any]

MOST_ARROW_VALUES: int

def flat_array(values: _Array) -> pa.Array: ...
def list_array(lengths: _Array, values: pa.Array, valid: _Array | None) -> pa.ListArray: ...

class LaneArray(_Array):
    def to_torch(self) -> Tensor:
        """A torch tensor of its own memory."""

class Ragged:
    """A list column of one record: flat values in place, and the length of each row."""

    def __init__(self, values: _Array, lengths: _Array, valid: _Array | None) -> None: ...
    @property
    def values(self) -> _Array:
        """The values of all rows, flat: a read-only view of the lane."""
    @property
    def lengths(self) -> _Array:
        """Values in each row, uint32[rows]."""
    @property
    def valid(self) -> _Array | None:
        """bool[rows] where some rows are null, None where none is."""
    @property
    def offsets(self) -> _Array:
        """Start of each row and the end of the last, int64[rows + 1]."""
    def __len__(self) -> int: ...
    def __getitem__(self, row: int) -> _Array: ...
    def __iter__(self) -> Iterator[_Array]: ...
    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]: ...
    def tolist(self) -> list[list[Any] | None]:
        """The rows as lists of Python numbers, a copy; None for a null row."""
    def to_padded(self, fill: float = 0) -> _Array:
        """The rows as one array (rows, longest), `fill` behind the end of each: a copy."""
    def to_arrow(self) -> pa.ListArray:
        """A pyarrow.ListArray over the same values; it keeps the lease until it is dropped."""
    def to_torch(self) -> Tensor:
        """All values, flat, as a torch tensor of its own memory: a copy."""

@dataclass(frozen=True)
class Origin:
    node: str
    producer_id: str
    sequence: int
    waited_ns: int
    transfer_ns: int

@dataclass(frozen=True)
class RecordMeta:
    """Where a record came from and when.

    Times are CLOCK_MONOTONIC nanoseconds; versions are -1 where none was stamped.
    """

    producer_id: str
    """The producer's id, unique to its incarnation."""
    env_name: str
    """Name of the environment."""
    sequence: int
    """The record's number in its producer's lane, from 0; with `producer_id` unique for ever."""
    group_id: str
    """Id of the group."""
    group_size: int
    """Rows of the whole group; a fragment has fewer."""
    env_id: int | None
    """The number under which the environment has registered; None if it has none."""
    min_policy_version: int
    """The oldest policy version that sampled it."""
    max_policy_version: int
    """The newest policy version that sampled it."""
    t_created_ns: int
    """When `put` or `claim` began."""
    t_publish_ns: int
    """When it was committed."""
    split: str
    """"train" or "eval"."""
    redelivered: bool
    """Whether an earlier consumer may have had it."""
    uneven: bool
    """Whether some column has rows of another length than the tokens."""
    origin: Origin | None
    """Where it lay before a relay brought it to this node; None if it was put here."""

class LeasedRecord(Lease):
    @property
    def meta(self) -> RecordMeta:
        """Who, when, which group, which policy version. Valid also after release()."""
    @property
    def columns(self) -> list[str]:
        """Names of the columns that have values in this record."""
    @property
    def _split(self) -> str:
        """`meta.split`, without a look at the record."""
    def __len__(self) -> int: ...
    def __contains__(self, name: object) -> bool: ...
    def __getitem__(self, name: str) -> Any: ...
    def valid(self, name: str) -> _Array | None:
        """bool[rows] where some rows of the column are null, None where none is."""
    def row_checks(self, name: str) -> _Array | None:
        """uint64[rows], a copy: each row's check (shmbridge.record.record), 0 for none; or None."""
    def _viewed(self) -> list[str] | None: ...
    def _tag(self, name: str) -> int: ...
    def _values(self, name: str) -> _Array: ...
    def _lengths(self, name: str) -> _Array: ...
    def _inner_lengths(self, name: str) -> _Array: ...
    def _keys(self, name: str) -> bytes: ...

class Pool:
    spare_bytes: int
    keep_bytes: int
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]: ...

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
