"""Writes one process' shards into a filling: a rank of a sharded learner, with a ticket from the writer.

A process killed anywhere leaves its bytes uncounted, and the writer does not commit.
"""

import time
from typing import Any

import msgspec

from shmbridge._ext import header
from shmbridge._ext import weights as versions
from shmbridge._ext.weights import Versions
from shmbridge.errors import FillingOver, WeightsMismatch
from shmbridge.segments import LockByte, is_locked, lock_shared, unlock
from shmbridge.weights import tensors
from shmbridge.weights.endpoint import WeightsEnd
from shmbridge.weights.table import TensorSpec, open_segment, read_table
from shmbridge.weights.tensors import Index

_RETRY_S = 0.0005


class _FillToken(msgspec.Struct, frozen=True):
    """The content of `WeightsFilling.ticket`."""

    segment: str
    filling: int
    version: int


class WeightsPart(WeightsEnd):
    """Writes shards of the tensors of a filling that a WeightsWriter in another process has opened.

    For one thread; a context manager.
    """

    _called = "part of the weights' writer"

    def __init__(self, bridge: str) -> None:
        super().__init__(bridge)
        self._rows: dict[str, tuple[int, TensorSpec]] = {}

    def write(self, ticket: Any, name: str, tensor: Any, index: Index | None = None) -> None:
        """Copies a tensor, or the shard of it that `index` names, into the version being filled.

        Blocks for the copy.

        Args:
            ticket: `WeightsFilling.ticket` of the writer's process; it may have passed through JSON.
            name: of the tensor.
            tensor: torch tensor or ndarray, of the shape of the shard.
            index: tuple of slices into the full tensor; None for all of it. Each element is written once, by
                one process.

        Raises:
            FillingOver: the ticket's filling has ended, its writer is dead, or another one has begun; nothing
                was written.
            WeightsMismatch: name, type or shape differ from the writer's table; nothing was written.
        """
        self._require_open()
        wanted = self._read(ticket)
        found = self._attach(wanted)
        if name not in self._rows:
            raise WeightsMismatch(
                f"the segment has no tensor {name!r}", hint="one bridge carries one model: use another bridge"
            )
        row, spec = self._rows[name]
        source = tensors.as_source(name, tensor)
        try:
            self._hold(found, wanted)
            header.fault(b"weights.part_locked")
            if not found.lets_in(wanted.filling) or not is_locked(found.mapping.fd, LockByte.WRITER):
                raise self._over(wanted)
            slot = wanted.filling // 2 % versions.slots
            base = found.slot_at(slot)
            size, finite = tensors.write(
                found.mapping, base, spec, source, index, going_round=found.slot_bytes
            )
            if not finite:
                found.mark_not_finite(slot, row)
            header.fault(b"weights.part_written")
            found.add_written(row, size)
            header.fault(b"weights.part_counted")
        finally:
            try:
                unlock(found.mapping.fd, LockByte.PARTS)
            except BaseException:  # a signal handler's, which came just before
                unlock(found.mapping.fd, LockByte.PARTS)
                raise

    def _read(self, ticket: Any) -> _FillToken:
        try:
            found = msgspec.convert(ticket, _FillToken)
        except msgspec.ValidationError as wrong:
            raise FillingOver(
                f"{ticket!r} is no ticket of a filling: {wrong}", hint="hand on what filling.ticket is"
            ) from None
        if not 0 <= found.filling < 1 << 64:
            raise FillingOver(f"{ticket!r} is no ticket of a filling", hint="hand on what filling.ticket is")
        return found

    def _attach(self, wanted: _FillToken) -> Versions:
        """Returns the ticket's segment, with its table."""
        if self._versions is None or f"{self._versions.segment_id:016x}" != wanted.segment:
            self._versions = None
            found = open_segment(self.bridge)
            if found is None or f"{found.segment_id:016x}" != wanted.segment:
                raise self._over(wanted)
            self._rows = {spec.name: (row, spec) for row, spec in enumerate(read_table(found, self.bridge))}
            self._versions = found
        return self._versions

    def _hold(self, found: Versions, wanted: _FillToken) -> None:
        """Takes the parts' lock as a sharer; the writer holds it alone for moments, before and after a
        filling.
        """
        while not lock_shared(found.mapping.fd, LockByte.PARTS):
            if not found.lets_in(wanted.filling):
                raise self._over(wanted)
            time.sleep(_RETRY_S)

    def _over(self, wanted: _FillToken) -> FillingOver:
        return FillingOver(
            f"the filling of version {wanted.version} of the weights of bridge {self.bridge!r} is over, or "
            "its writer is dead",
            hint="wait for the writer's next ticket",
        )
