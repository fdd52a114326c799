"""The values of one bridge: a put becomes a segment, a read a view of it, a clear the release of its rows.

Any thread may call anything here; two puts share nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from shmbridge.config import format_size
from shmbridge.consumers.transfer_queue.columns import Column, Placed, Stored, place
from shmbridge.errors import LaneFull, LayoutMismatch, RecordUnreadable, ShmPermission
from shmbridge.segments import (
    MOUNT,
    read_values_head,
    release_values,
    stands_there,
    value_bytes,
    value_names,
    values_head,
    write_values,
)

_LOOK_AGAIN_S, _LOOK_AT_LEAST_S = 0.01, 0.1  # a look lists the bridge, and many puts may wait
_decode_table = msgspec.msgpack.Decoder(list[Placed]).decode


class Cleared(KeyError):
    """The values of a row are gone: the row was cleared."""


class Run(NamedTuple):
    """Rows that follow each other in one stored column."""

    column: Stored
    first: int
    last: int  # exclusive


class OpenSegment:
    """A segment of values, mapped copy-on-write: readers may write there, and nobody else sees it."""

    def __init__(self, name: str) -> None:
        """Copies nothing but the table. Raises Cleared, LayoutMismatch, RecordUnreadable."""
        path = MOUNT / name[1:]
        try:
            whole = torch.from_file(str(path), shared=False, size=_size_of(path), dtype=torch.uint8)
        except (RuntimeError, OSError):
            if stands_there(name):
                raise
            raise Cleared(f"{name} is gone: its rows were cleared") from None
        self.name = name
        head = values_head(whole.numpy(), name)
        self._data = whole[head.data_at : head.size]
        self._rows = {owner: row for row, owner in enumerate(head.owners.tolist())}  # the last of equal ones
        self._count = len(head.owners)
        try:
            self._placed = {each.name: each for each in _decode_table(head.table)}
        except msgspec.MsgspecError as wrong:
            raise RecordUnreadable(f"{name}: its table: {wrong}", hint="put its rows again") from wrong
        self._columns: dict[str, Stored] = {}

    def column(self, field: str) -> Stored:
        """Returns a field's column; raises KeyError if the put had no such field."""
        if field not in self._columns:
            self._columns[field] = Stored(self._placed[field], self._data, self._count)
        return self._columns[field]

    def row(self, owner: int) -> int:
        """Returns the place of a row; raises KeyError if it is not in this put."""
        return self._rows[owner]


class ValueStore:
    """The values of one bridge, for this process. Holds no memory and no descriptor between calls."""

    def __init__(self, bridge: str, capacity: int | None = None, timeout_s: float = 60.0) -> None:
        """Does not block.

        Args:
            bridge: the name of the bridge.
            capacity: bytes of all values of the bridge; None: what the mount and the memory cgroup have.
            timeout_s: how long a put waits for room.
        """
        self.bridge, self.capacity, self.timeout_s = bridge, capacity, timeout_s
        self._lock = threading.Lock()
        self._owners: dict[str, frozenset[int]] = {}  # of the segments seen, for clear

    def put(self, owners: Sequence[int], columns: Sequence[Column]) -> str:
        """Commits the columns of some rows and returns the name of their segment. One copy of each byte.

        Blocks while it copies, and while the bridge holds as much as its capacity.

        Args:
            owners: the number of each row in the whole queue.
            columns: fields of these rows.

        Raises:
            LaneFull: there was no room in time; nothing was committed.
            ShmTooSmall: the mount or the memory cgroup has no room; nothing was committed.
        """
        for pause_s in self.waits(columns):
            time.sleep(pause_s)
        return self.write(owners, columns)

    def write(self, owners: Sequence[int], columns: Sequence[Column]) -> str:
        """As `put`, but does not wait for room: the caller has done that. Blocks while it copies."""
        placed, parts = place(columns)
        table = msgspec.msgpack.encode(placed)
        return write_values(self.bridge, np.array(owners, np.int64), table, parts)

    def waits(self, columns: Sequence[Column]) -> Iterator[float]:
        """Yields a pause in seconds, again and again, until there is room for these columns. Never blocks.

        Raises LaneFull if there was none within `timeout_s`.
        """
        if self.capacity is None:
            return
        size, deadline = sum(column.size for column in columns), time.monotonic() + self.timeout_s
        pause_s = _LOOK_AGAIN_S
        while (held := value_bytes(self.bridge))[1] + size > self.capacity:
            if size > self.capacity or time.monotonic() > deadline:
                raise self._full(size, held, self.capacity)
            yield pause_s
            pause_s = min(1.5 * pause_s, _LOOK_AT_LEAST_S)

    def open(self, name: str) -> OpenSegment:
        """Maps the segment of a put; raises Cleared if its rows were cleared. Copies no values."""
        return OpenSegment(name)

    def clear(self, owners: Iterable[int]) -> None:
        """Releases all values of these rows, from every process and every put. Idempotent, never blocks."""
        wanted = set(owners)
        with self._lock:
            names = value_names(self.bridge)
            self._owners = {name: found for name in names if (found := self._owners_of(name)) is not None}
            touched = [name for name, found in self._owners.items() if not wanted.isdisjoint(found)]
        for name in touched:
            if (head := read_values_head(name)) is not None:
                release_values(name, np.flatnonzero(np.isin(head.owners, list(wanted))).tolist())

    def discard(self, name: str) -> None:
        """Releases a put that nobody was told of."""
        if (head := read_values_head(name)) is not None:
            release_values(name, range(len(head.owners)))

    def _owners_of(self, name: str) -> frozenset[int] | None:
        if name not in self._owners:
            try:
                head = read_values_head(name)
            except (RecordUnreadable, LayoutMismatch, ShmPermission):  # being written, or garbage: not ours
                return None
            if head is None:
                return None
            return frozenset(head.owners.tolist())
        return self._owners[name]

    def _full(self, size: int, held: tuple[int, int], capacity: int) -> LaneFull:
        puts, there = held
        if size > capacity:
            return LaneFull(
                f"a put of {format_size(size)} can never fit: all values of bridge {self.bridge!r} together "
                f"may have {format_size(capacity)}",
                hint="put fewer rows at a time, or raise backend.shmbridge.capacity",
            )
        return LaneFull(
            f"a put of {format_size(size)} found {format_size(there)} in {puts} puts that nobody has "
            f"cleared, of {format_size(capacity)}, for {self.timeout_s:g} s",
            hint="clear rows after their step (kv_clear), or raise backend.shmbridge.capacity",
        )


def runs(stored: Iterable[tuple[Stored, int]]) -> list[Run]:
    """Joins rows that follow each other in one column."""
    found: list[Run] = []
    for column, row in stored:
        if found and found[-1].column is column and found[-1].last == row:
            found[-1] = found[-1]._replace(last=row + 1)
        else:
            found.append(Run(column, row, row + 1))
    return found


def joined(found: Sequence[Run]) -> Any:
    """Returns a field of some rows as TransferQueue gives it: (rows,) for numbers, a jagged or strided nested
    tensor, or else a NonTensorStack. A view if all rows follow each other in one put, otherwise one copy.
    """
    first = found[0].column
    rows = [(run.column, row) for run in found for row in range(run.first, run.last)]
    if not all(run.column.is_tensor and run.column.dtype == first.dtype for run in found):
        return _stack([column.value(row) for column, row in rows])
    shapes = [column.shape(row) for column, row in rows]
    rest = shapes[0][1:]
    if any(len(shape) != len(rest) + 1 or shape[1:] != rest for shape in shapes[1:]) or not rest + shapes[0]:
        if not any(shapes):
            return _flat(found)
        return _odd([column.value(row) for column, row in rows])
    lengths = [shape[0] for shape in shapes]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    whole = (
        _flat(found).view(-1, *rest) if 0 not in rest else torch.empty(sum(lengths), *rest, dtype=first.dtype)
    )
    return torch.nested.nested_tensor_from_jagged(
        whole, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def _flat(found: Sequence[Run]) -> torch.Tensor:
    parts = [run.column.flat(run.first, run.last) for run in found]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _odd(rows: list[torch.Tensor]) -> Any:
    """Tensors whose shapes differ in more than the first dimension."""
    try:
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    except (RuntimeError, TypeError):
        return _stack(rows)


def _stack(rows: list[Any]) -> Any:
    from tensordict import NonTensorStack

    return NonTensorStack(*rows)


def _size_of(path: Path) -> int:
    return path.stat().st_size
