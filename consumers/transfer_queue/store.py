"""The values of one bridge: a put becomes a segment, a read a view of it, a clear the release of its rows.

Any thread may call anything of a store; two puts share nothing. A lock on the control segment of the bridge
shows that its queue lives: the controller of TransferQueue dies with the process that made it, and with it
all that is known of the values. The next queue of the bridge may then remove what it left.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from shmbridge.config import check_bridge_name, format_size, parse_size
from shmbridge.consumers.transfer_queue.columns import Column, Placed, Stored, place
from shmbridge.errors import BadConfig, LaneFull, LayoutMismatch, QueueTaken, RecordUnreadable, ShmPermission
from shmbridge.segments import (
    MOUNT,
    LockByte,
    leave_bridge,
    lock_exclusive,
    mount_id,
    open_control,
    read_values_head,
    release_values,
    remove_values,
    stands_there,
    sweep_bridge,
    value_bytes,
    value_names,
    values_head,
    write_values,
)

log = logging.getLogger(__name__)

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


BRIDGE = "transfer-queue"  # if the configuration names none
SETTINGS = ("bridge", "capacity", "timeout_s")


class Membership:
    """This process' part in a bridge: its lock shows it to `shmbridge clean`, and keeps the bridge."""

    def __init__(self, bridge: str) -> None:
        """Blocks while another process creates the bridge, 10 s at most."""
        self._control = open_control(bridge)
        self._leave = weakref.finalize(self, _leave, self._control, bridge, os.getpid())

    @property
    def fd(self) -> int:
        """Of the control segment, for locks."""
        return self._control.mapping.fd

    def leave(self) -> None:
        """Gives up all its locks, and removes what dead processes left. Idempotent."""
        self._leave()


class Queue:
    """The queue of a bridge, for the process that began it; its values go with it."""

    def __init__(self, bridge: str) -> None:
        """Takes the bridge, and removes what an earlier queue left there.

        Raises:
            QueueTaken: a living process has a queue on that bridge.
        """
        self._membership = Membership(bridge)
        if not lock_exclusive(self._membership.fd, LockByte.VALUES):
            self._membership.leave()
            raise QueueTaken(
                f"bridge {bridge!r} has a living queue",
                hint=f"choose another name: backend.shmbridge.bridge={bridge}2",
            )
        _remove_all(bridge, "an earlier queue of the bridge left them")
        sweep_bridge(bridge)
        self._end = weakref.finalize(self, _end, bridge, self._membership, os.getpid())

    def close(self) -> None:
        """Ends the queue: removes all its values. Idempotent; the end of the process does it, too."""
        self._end()


def join(settings: Mapping[str, Any]) -> Membership:
    """Takes part in the bridge of a queue that was begun; raises BadConfig on another node."""
    here, there = mount_id(), settings.get("mount", "")
    if here != there:
        raise BadConfig(
            f"this process has another {MOUNT} ({here or 'unknown'}) than who began the queue "
            f"({there or 'unknown'})",
            hint="keep all clients of the queue on one node, or share /dev/shm between their containers",
        )
    return Membership(settings["bridge"])


def begin(settings: Mapping[str, Any]) -> tuple[Queue, dict[str, Any]]:
    """Begins the queue that the configuration names; returns it, and the configuration for its clients.

    Raises:
        QueueTaken: a living process has a queue on that bridge.
        BadConfig, BadBridgeName: a setting is none, or has no such value; nothing began.
    """
    check_settings(settings)
    bridge = settings.get("bridge") or BRIDGE
    return Queue(bridge), {**settings, "bridge": bridge, "mount": mount_id()}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises BadConfig or BadBridgeName for what no client of the queue could work with."""
    if unknown := sorted(set(settings) - set(SETTINGS)):
        raise BadConfig(
            f"backend.shmbridge has no setting {', '.join(unknown)}", hint=f"use one of {', '.join(SETTINGS)}"
        )
    if settings.get("bridge"):
        check_bridge_name(settings["bridge"])
    capacity_of(settings)
    timeout_of(settings)


def capacity_of(settings: Mapping[str, Any]) -> int | None:
    """Returns the bytes that all values of the queue may have, None for any; raises BadConfig."""
    capacity = settings.get("capacity")
    try:
        size = None if capacity is None else parse_size(str(capacity))
    except ValueError as wrong:
        raise BadConfig(f"backend.shmbridge.capacity: {wrong}", hint='capacity="8G", or none') from None
    if size == 0:
        raise BadConfig("backend.shmbridge.capacity is 0: no put would fit", hint='capacity="8G", or none')
    return size


def timeout_of(settings: Mapping[str, Any]) -> float:
    """Returns how many seconds a put waits for room, 60 if nothing is said; raises BadConfig."""
    timeout_s = settings.get("timeout_s", 60.0)
    try:
        seconds = math.inf if timeout_s is None else float(timeout_s)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds >= 0:
        raise BadConfig(
            f"backend.shmbridge.timeout_s={timeout_s!r} is no number of seconds",
            hint="timeout_s=60, or null to wait for ever",
        )
    return seconds


def _remove_all(bridge: str, why: str) -> None:
    found = [remove_values(name, with_records=True) for name in value_names(bridge)]
    if rows := sum(held for removed, _, held in found if removed):
        log.warning("bridge %s: %d rows that nobody had cleared were removed: %s", bridge, rows, why)


def _leave(control: Any, bridge: str, pid: int) -> None:
    if os.getpid() == pid:
        leave_bridge(control.mapping.fd, bridge)


def _end(bridge: str, member: Membership, pid: int) -> None:
    if os.getpid() == pid:
        _remove_all(bridge, "the process that began their queue has ended it")
        member.leave()
