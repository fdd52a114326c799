"""Batches with some columns on the device, copied record by record straight from the ring.

    with DeviceCopies("cuda", columns=("tokens", "inference_logprobs")) as copies:
        for batch in consumer.batches(groups=64, make=copies.batch):
            batch.tokens  # an int32 tensor on the device; everything else is as in any packed batch

The copies write no host memory; with lanes registered with CUDA, the CPU reads none either. The thread that
forms batches starts them on their own stream, so `prefetch` batches are on the device ahead of the one being
trained. A batch ends its leases only after its copies have ended. On a CPU device the same copies gather the
batch.

Used by the learner's batch source, and by other trainers.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import shmbridge
from shmbridge.batch import Layout
from shmbridge.consumers.pinned import PinnedLanes, cuda_driver
from shmbridge.record import Group, lane_columns
from shmbridge.schema import Kind


class DeviceCopies:
    """A copy stream to one device, and the lanes registered with it. A context manager.

    Args:
        device: where the columns go; may be "cpu".
        columns: per-token columns copied straight to it.
        lanes: registers lanes; None: the CUDA driver's registry if the device is CUDA.
    """

    def __init__(
        self,
        device: torch.device | str,
        columns: Collection[str] = ("tokens",),
        lanes: PinnedLanes | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.columns = tuple(columns)
        self.lanes = lanes or PinnedLanes(cuda_driver() if self.device.type == "cuda" else None)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # the prefetch thread may form a batch while another thread calls close()
        self._one_at_a_time = threading.Lock()
        self._closed = False

    def batch(self, groups: list[Group], layout: Layout = "packed") -> DeviceBatch:
        """Returns a batch of leased groups whose copies are in flight; pass this method to
        `Consumer.batches(make=)`.

        Raises:
            ValueError: a column is not per-token, the layout is not "packed", or this is closed.
        """
        if layout != "packed":
            raise ValueError(f"layout {layout!r}: what goes to a device is packed")
        with self._one_at_a_time:
            if self._closed:
                raise ValueError("the way to the device is closed: its groups stay in their lanes")
            return DeviceBatch(groups, self)

    def close(self) -> None:
        """Ends all copies and unregisters the lanes; no batch can be formed afterwards.

        Blocks for a batch being formed, and for its copies. Idempotent.
        """
        with self._one_at_a_time:
            self._closed = True
            self.finish()
            self.lanes.close()

    def finish(self) -> None:
        """Blocks for all copies in flight."""
        if self.stream is not None:
            self.stream.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceBatch(shmbridge.Batch):
    """A packed `shmbridge.Batch` in which some columns are tensors on the device; see `DeviceCopies`.

    Use a tensor on the stream that is current when you access it: that stream waits for the copies.
    """

    def __init__(self, groups: list[Group], copies: DeviceCopies) -> None:
        super().__init__(groups, "packed", in_place=copies.columns)
        self._copies = copies
        self._under_way: list[Tensor] = []  # views of the lanes' memory; each holds its record's lease
        self._event: torch.cuda.Event | None = None
        stream = copies.stream
        if stream is None:
            self._copy_all()
            self._under_way = []
            return
        try:
            with torch.cuda.device(copies.device), torch.cuda.stream(stream):
                self._copy_all()
                self._event = torch.cuda.Event()
                self._event.record(stream)
        except BaseException:
            stream.synchronize()  # copies already started read records that are about to be released
            raise

    def release(self) -> None:
        """Ends the leases of the batch's records once its copies have ended. Blocks for them; idempotent."""
        self._end_copies()
        super().release()

    if not TYPE_CHECKING:  # as in Batch

        def __getattr__(self, name: str) -> Any:
            return self._usable(super().__getattr__(name))

    def __getitem__(self, name: str) -> Any:
        return self._usable(super().__getitem__(name))

    def __del__(self) -> None:
        if self.__dict__.get("_under_way"):  # once the leases end, the producer may overwrite the memory
            self._end_copies()

    def _end_copies(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        self._under_way = []

    def _usable(self, value: Any) -> Any:
        event = self.__dict__.get("_event")
        if event is not None and isinstance(value, Tensor):
            stream = torch.cuda.current_stream(self._copies.device)
            event.wait(stream)
            value.record_stream(stream)  # the allocator keeps the memory until this stream is done with it
        return value

    def _copy_all(self) -> None:
        if self._copies.stream is not None:
            torch.empty(1, device=self._copies.device)  # creates this thread's CUDA context
        self._copies.lanes.forget_gone(self._copies.finish)
        for record in self.records:
            self._copies.lanes.pin(record)
        for name in self._copies.columns:
            if any(name in record for record in self.records):
                self._columns[name], self._present[name] = self._copied(name)

    def _copied(self, name: str) -> tuple[Tensor, npt.NDArray[np.bool_]]:
        """Returns (N,) on the device, 0 in rows without the column, and bool (B,): rows that have it."""
        column = next(lane_columns(record)[name] for record in self.records if name in record)
        if not column.per_token or column.kind is not Kind.LIST:
            raise ValueError(
                f"column {name!r} has no value per token, so it is not for the device: leave it out of "
                "`columns`"
            )
        present, uneven = np.zeros(len(self), bool), np.zeros(len(self), bool)
        parts: list[tuple[int, Tensor]] = []
        row = 0
        for record in self.records:
            rows = slice(row, row + len(record))
            row = rows.stop
            if name not in record:
                continue
            ragged = record[name]
            present[rows], uneven[rows] = _fitting(ragged, self.lengths[rows])
            for to, values in _blocks(ragged, self.cu_seqlens[rows.start : rows.stop + 1]):
                for part in self._copies.lanes.cut(record, values):
                    parts.append((to, _over(part)))
                    to += len(part)
        if uneven.any():
            self.uneven[name] = uneven
        whole = sum(len(source) for _, source in parts) == self.token_count
        new = torch.empty if whole else torch.zeros
        made = new(
            self.token_count,
            dtype=torch.from_numpy(np.empty(0, column.dtype)).dtype,
            device=self._copies.device,
        )
        self._under_way += [source for _, source in parts]
        for to, source in parts:
            made[to : to + len(source)].copy_(source, non_blocking=True)
        return made, present


def _blocks(ragged: Any, ends: npt.NDArray[np.int32]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yields (destination offset, values): the whole record if each row fits its tokens, else row by row."""
    lengths = np.diff(ends)
    if len(ragged) == len(lengths) and np.array_equal(ragged.lengths, lengths):
        yield int(ends[0]), ragged.values
        return
    for row in np.flatnonzero(_fitting(ragged, lengths)[0]).tolist():
        yield int(ends[row]), ragged[row]


def _fitting(
    ragged: Any, lengths: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Returns two bools per row of a record: the row has a value for each token; the column's length differs
    from the row's, as in `Batch`.
    """
    if len(ragged) != len(lengths):
        return np.zeros(len(lengths), bool), np.ones(len(lengths), bool)
    there = np.ones(len(lengths), bool) if ragged.valid is None else np.asarray(ragged.valid, bool)
    fits = ragged.lengths == lengths
    return there & fits, there & ~fits


class _Memory:
    """A read-only array's memory for torch, which takes only writable memory. Keeps the lease."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self.__array_interface__ = values.__array_interface__ | {"data": (values.ctypes.data, False)}


def _over(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(_Memory(values)))
