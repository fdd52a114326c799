"""The one writer of a bridge's weights: fills the older slot, alone or with shard writers in other processes,
then moves one word.

table.py copies the values. A death at any line leaves the last complete version. A shard writer writes a part
of a version from another process; the version floor is the number that a new version must exceed.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from shmbridge._ext import header
from shmbridge._ext import weights as tensor_bytes
from shmbridge._ext import weights as versions
from shmbridge._ext.header import Control, Mapping
from shmbridge._ext.weights import Versions
from shmbridge.config import check_timeout, check_version, deadline_of
from shmbridge.errors import (
    BadArgument,
    ConsumerTaken,
    FillingOver,
    LayoutMismatch,
    WeightsBusy,
    WeightsMismatch,
)
from shmbridge.segments import (
    LockByte,
    is_locked,
    lock_after,
    lock_exclusive,
    lock_shared,
    map_now,
    map_segment,
    open_mapping,
    open_segment,
    require_room_for_weights,
    run_to_end,
    still_named,
    unlink_segment,
    unlock,
    weights_name,
)
from shmbridge.weights import table
from shmbridge.weights import table as weights_tensors
from shmbridge.weights.table import (
    Index,
    Spec,
    TensorSpec,
    WeightsEnd,
    as_specs,
    create,
    difference,
    lay_out,
    not_finite,
    number_bits,
    open_weights_segment,
    read_table,
    segment_bytes,
)


def version_floor(control: Control, bridge: str) -> int | None:
    """Returns the highest version of the segments that were replaced; None if none was.

    Raises LayoutMismatch for a value that no writer can have left.
    """
    version = control.weights_floor
    if version >= versions.end:
        raise LayoutMismatch(
            f"the control segment of bridge {bridge!r} says that its weights had version {version}, none is "
            f"above {versions.end - 1}",
            hint="something overwrote it: end what uses the bridge and run: shmbridge clean <bridge> --yes",
        )
    return None if version < 0 else int(version)


def require_above(version: int, last: int | None) -> None:
    """Raises BadArgument unless the version is above the last one."""
    if last is not None and version <= last:
        raise BadArgument(
            f"weights version {version} is not after {last}: versions of one bridge only rise",
            hint=f"publish version {last + 1}, or use another bridge for a run from 0",
        )


def keep(control: Control, found: Versions, bridge: str) -> None:
    """Raises the floor to the newest version of the named segment; the caller holds its writer's lock.

    Raises LayoutMismatch as `version_floor`.

    The segment may be incomplete: its version is the one on which two words of the header agree, whatever
    happened to the others.
    """
    version_floor(control, bridge)
    if (latest := found.latest) is not None:
        control.raise_weights_floor(latest[0])


def remove_segment(control: Control, bridge: str, version: int, size: int) -> None:
    """Removes the weights segment, complete or not, to make room for one of `size` bytes that begins with
    `version`, if no writer lives; keeps its last version in the control segment.

    Readers that map it keep it until they check again. Raises ValueError if it has that version or a later
    one, ShmTooSmall if the mount has no room for the new one even without it, LayoutMismatch as
    `version_floor`: the segment then stays.
    """
    name = weights_name(bridge)
    with contextlib.suppress(FileNotFoundError):
        file = open_segment(name)
        try:
            if not (lock_exclusive(file.fd, LockByte.WRITER) and still_named(file.fd, name)):
                return
            # Not before: its writer may have reserved it, and published, since.
            if os.fstat(file.fd).st_size >= versions.header_bytes:
                mapping = map_segment(file, versions.header_bytes, f"segment {name}", readonly=True)
                keep(control, Versions(mapping), bridge)
            require_above(version, version_floor(control, bridge))
            require_room_for_weights(bridge, size, freed=os.fstat(file.fd).st_size)
            unlink_segment(file.fd, name)
            header.fault(b"weights.removed")
        finally:
            unlock(file.fd, LockByte.WRITER)  # the error's frames keep the mapping, and so the lock
            file.close()


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
        source = table.as_source(name, tensor)
        try:
            self._hold(found, wanted)
            header.fault(b"weights.part_locked")
            if not found.lets_in(wanted.filling) or not is_locked(found.mapping.fd, LockByte.WRITER):
                raise self._over(wanted)
            slot = wanted.filling // 2 % versions.slots
            base = found.slot_at(slot)
            size, finite = table.write(found.mapping, base, spec, source, index, going_round=found.slot_bytes)
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
            found = open_weights_segment(self.bridge)
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


_RETRY_S = 0.0005
_ONE_MODEL = "one bridge carries one model: use another bridge"

log = logging.getLogger(__name__)


class WeightsWriter(WeightsEnd):
    """The one writer of a bridge's weights. For one thread; a context manager.

    Takes over the segment a dead writer left. Raises ConsumerTaken if another writer is alive, LayoutMismatch
    if something overwrote the bridge's control segment.
    """

    _called = "weights writer"

    def __init__(self, bridge: str) -> None:
        super().__init__(bridge)
        self._table: list[TensorSpec] = []
        self._rows: dict[str, int] = {}
        self._wrote_here = False
        self._under_way: int | None = None  # the version being written
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        assert self._control is not None
        version_floor(self._control, self.bridge)
        name = weights_name(self.bridge)
        early = open_mapping(name, minimum=versions.header_bytes)
        if early is None:
            return
        if not lock_after(lambda: Versions(early).writer_pid, early.fd, LockByte.WRITER):
            raise self._taken(early)
        if not still_named(early.fd, name):
            return  # another writer has just removed it; our publish makes it again
        # Again: its creator may have reserved the rest, and published, before it let the lock go.
        mapping = map_now(early.file, name)
        assert mapping is not None
        found = Versions(mapping)
        try:
            if found.ready:
                self._use(found, read_table(found, self.bridge))
                found.enter(os.getpid())
                return
        except WeightsMismatch as remains:
            log.warning("%s: they are made again", remains.message)
        keep(self._control, found, self.bridge)

    def _taken(self, living: Mapping | None) -> ConsumerTaken:
        pid = 0 if living is None else Versions(living).writer_pid
        who = f": pid {pid}{' (this very process)' if pid == os.getpid() else ''}" if pid else ""
        return ConsumerTaken(
            f"the weights of bridge {self.bridge!r} have a living writer{who}",
            hint="one learner writes weights, one of several ranks: end the other",
        )

    def _use(self, found: Versions, table: list[TensorSpec]) -> None:
        self._versions, self._table = found, table
        self._rows = {spec.name: row for row, spec in enumerate(table)}

    @property
    def last_version(self) -> int | None:
        """The newest complete version, also one of an earlier writer or of another model whose segment is
        gone; None if there was none.

        Never blocks. LayoutMismatch if something overwrote the bridge's control segment.
        """
        self._require_open()
        assert self._control is not None
        floor = version_floor(self._control, self.bridge)
        latest = self._versions.latest if self._versions is not None else None
        return floor if latest is None else max(int(latest[0]), -1 if floor is None else floor)

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Any]],
        *,
        changed_only: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        """Copies the tensors into the free slot and makes them the newest version.

        Blocks for the copy, and while a reader still holds the slot, at most `timeout_s` seconds.

        Args:
            version: policy version, above `last_version`.
            tensors: (name, torch tensor or ndarray), in any order; names, dtypes and shapes stay the same
                over versions. Each is copied when it comes, except for a writer's first version: then all are
                checked first.
            changed_only: only changed tensors are given; all others keep their value of the last version,
                from any writer.
            timeout_s: seconds.

        Raises:
            WeightsMismatch: the tensors are not those of the table (names the first that differs); with
                `changed_only`, that the segment has no version yet.
            WeightsBusy: a reader held the slot for too long, or a shard of an earlier filling is still being
                written; the last version stays.
            ConsumerTaken: two writers began before there was a version, and the other was first.
            FillingOver: this writer is writing a version.
            ShmTooSmall: no room for a first version; another model's version stays if even its room would not
                be enough.
            ValueError: the version does not rise. LayoutMismatch: as `last_version`.
        """
        version = self._check(version)
        if changed_only and (self._versions is None or self._versions.latest is None):
            raise WeightsMismatch(
                f"the weights of bridge {self.bridge!r} have no version yet",
                hint="publish every tensor first",
            )
        tensors = weights_tensors.pairs(tensors)
        if not (changed_only or self._wrote_here):
            tensors = [(name, weights_tensors.on_host(name, tensor)) for name, tensor in tensors]
            self._fit(version, [(name, *weights_tensors.kind(source)) for name, source in tensors])
        found = self._segment()
        slot, newest = self._slots()
        with self._open(version, slot, timeout_s):
            stamps = found.stamps(newest)
            base, going_round = found.slot_at(slot), found.slot_bytes
            for row, source in self._to_write(tensors, slot, newest, changed_only):
                spec = self._table[row]
                found.touch(slot, row)
                if source is not None:
                    _, finite = weights_tensors.write(
                        found.mapping, base, spec, source, going_round=going_round
                    )
                    stamps[row] = version + 1
                else:
                    at = found.slot_at(newest) + spec.offset
                    unchanged = memoryview(found.mapping)[at : at + spec.size_bytes]
                    place, number = base + spec.offset, number_bits(spec.dtype)
                    finite = tensor_bytes.copy_in(found.mapping, place, unchanged, going_round, number)
                if not finite:
                    found.mark_not_finite(slot, row)
                header.fault(b"weights.tensor_written")
            self._require_open()
            found.commit(slot, version, stamps)
            self._warn_not_finite(slot, version)

    async def publish_async(self, version: int, tensors: Iterable[tuple[str, Any]], **more: Any) -> None:
        """`publish` that never blocks the event loop, so that a reader of the version before the last can let
        go in the loop; same arguments.

        Await it before the next call. The tensors are read until it ends; a cancellation takes effect then.
        """
        await run_to_end(self.publish, version, tensors, **more)

    def _to_write(
        self, tensors: Iterable[tuple[str, Any]], slot: int, newest: int, changed_only: bool
    ) -> Iterator[tuple[int, Any]]:
        """Yields (row, source) of each given tensor as it comes; then (row, None) of each other tensor whose
        value in the slot is older.
        """
        given: set[int] = set()
        for name, tensor in tensors:
            if (row := self._rows.get(name)) is None or row in given:
                problem = "is not of them" if row is None else "comes twice"
                raise WeightsMismatch(
                    f"tensor {name!r} was given, the segment has {len(self._table)}: it {problem}",
                    hint=_ONE_MODEL,
                )
            given.add(row)
            yield row, weights_tensors.as_source(name, tensor)
        if not changed_only:
            if len(given) < len(self._table):
                came = [
                    (spec.name, spec.dtype, spec.shape)
                    for row, spec in enumerate(self._table)
                    if row in given
                ]
                raise WeightsMismatch(difference(self._table, came), hint=_ONE_MODEL)
            return
        here, there = self._segment().stamps(slot), self._segment().stamps(newest)
        for row in np.flatnonzero((here != there) | (there == 0)).tolist():
            if row not in given:
                yield row, None

    @contextmanager
    def fill(
        self, version: int, specs: Iterable[Spec], *, timeout_s: float = 30.0
    ) -> Iterator["WeightsFilling"]:
        """Opens a filling that several processes write, each its shards: commits at the end of the `with`
        block, nothing on an exception.

        Blocks while a reader holds the slot, and at the end while a shard is being written, at most
        `timeout_s` seconds each.

        Args:
            version: policy version, above `last_version`.
            specs: (name, dtype word, full shape) of every tensor of the model, in any order.
            timeout_s: seconds.

        Raises:
            WeightsMismatch: as `publish`; at the end also if the elements of some tensor were not written
                exactly once each: a rank was killed.
            WeightsBusy, ConsumerTaken, ShmTooSmall, FillingOver, ValueError, LayoutMismatch: as `publish`.
        """
        version = self._check(version)
        self._fit(version, as_specs(specs))
        found = self._segment()
        slot, _ = self._slots()
        with self._open(version, slot, timeout_s, with_parts=True) as word:
            filling = WeightsFilling(found, self._table, version, slot, word)
            try:
                yield filling
            finally:
                filling.is_open = False
                if not found.mapping.forked:
                    found.end_filling()
            self._require_open()
            with self._no_part_writes(timeout_s):
                self._require_whole(version)
                found.commit(slot, version, np.full(len(self._table), version + 1, np.uint64))
                self._warn_not_finite(slot, version)

    def _check(self, version: int) -> int:
        """Returns the version, if it can be written now."""
        self._require_open()
        if self._under_way is not None:
            raise FillingOver(
                f"version {self._under_way} of the weights of bridge {self.bridge!r} is being filled by "
                "this writer",
                hint="leave its `with` block; a writer is for one thread",
            )
        version = check_version("version", version)
        require_above(version, self.last_version)
        if version >= versions.end:
            raise BadArgument(f"weights version {version} is not from 0 to 2^60", hint="version counts steps")
        return version

    def _segment(self) -> Versions:
        assert self._versions is not None
        return self._versions

    def _slots(self) -> tuple[int, int]:
        """Returns the slot to fill, and the newest slot, whatever that holds before the first version."""
        latest = self._segment().latest
        return (0, 1) if latest is None else ((latest[1] + 1) % versions.slots, latest[1])

    def _fit(self, version: int, given: list[Spec]) -> None:
        """Makes the segment for the first version; later ones must match it.

        A dead writer's other model makes room for ours.

        The floor is checked again under the new segment's lock, which every writer needs to raise it: before,
        another writer may have raised it.
        """
        if self._versions is not None:
            differs = difference(self._table, given)
            if not differs:
                # the tensors' iterator may have published
                require_above(version, self.last_version)
                return
            if self._wrote_here:
                raise WeightsMismatch(differs, hint=_ONE_MODEL)
        table, slot_bytes = lay_out(given, self.bridge)
        if self._versions is not None:
            unlock(self._versions.mapping.fd, LockByte.WRITER)
            self._versions = None
        assert self._control is not None
        remove_segment(self._control, self.bridge, version, segment_bytes(table, slot_bytes))
        if (made := create(table, slot_bytes, self.bridge)) is None:
            raise self._taken(open_mapping(weights_name(self.bridge), minimum=versions.header_bytes))
        self._use(made, table)
        require_above(version, self.last_version)
        self._wrote_here = True

    @contextmanager
    def _open(self, version: int, slot: int, timeout_s: float, *, with_parts: bool = False) -> Iterator[int]:
        """Holds the slot alone, while no shard is being written into it; yields the filling's word.

        With shard writers, every tensor is torn from here on.
        """
        found = self._segment()
        self._hold(
            LockByte.FIRST_SLOT + slot,
            timeout_s,
            "a reader has held its slot",
            "copy the tensors and leave the `with` block",
        )
        try:
            self._under_way = version
            with self._no_part_writes(timeout_s):
                found.begin(slot)
                word = found.next_filling(slot, with_parts)
                for row in range(len(self._table) if with_parts else 0):
                    found.touch(slot, row)
            self._wrote_here = True
            yield word
        finally:
            self._under_way = None
            self._let_go(LockByte.FIRST_SLOT + slot)
            if not found.mapping.forked:
                found.ring()  # ring last: a woken process wants the slot, and may preempt this one

    @contextmanager
    def _no_part_writes(self, timeout_s: float) -> Iterator[None]:
        self._hold(
            LockByte.PARTS,
            timeout_s,
            "a rank has been writing its part of them",
            "look for a stopped rank: ps -eo pid,stat,cmd",
        )
        try:
            yield
        finally:
            self._let_go(LockByte.PARTS)

    def _let_go(self, byte: int) -> None:
        """Frees a lock; does nothing in a child of fork, where it is the parent's."""
        mapping = self._segment().mapping
        if not mapping.forked:
            unlock(mapping.fd, byte)

    def _hold(self, byte: int, timeout_s: float, who: str, hint: str) -> None:
        deadline = deadline_of(check_timeout(timeout_s))
        while not lock_exclusive(self._segment().mapping.fd, byte):
            if time.monotonic() > deadline:
                if _in_event_loop():
                    hint = (
                        "await publish_async: who reads in this thread's event loop cannot let go while "
                        "that is blocked; or "
                    ) + hint
                raise WeightsBusy(
                    f"weights of bridge {self.bridge!r}: {who} for more than {timeout_s:g} s", hint=hint
                )
            time.sleep(_RETRY_S)

    def _require_whole(self, version: int) -> None:
        for spec, written in zip(self._table, self._segment().written.tolist(), strict=True):
            if written != spec.size_bytes:
                raise WeightsMismatch(
                    f"version {version} of the weights of bridge {self.bridge!r} is not whole: "
                    f"{written} of {spec.size_bytes} bytes of tensor {spec.name!r} were written",
                    hint="every rank writes its part before the `with` block ends, each element once; was "
                    "one killed?",
                )

    def _warn_not_finite(self, slot: int, version: int) -> None:
        if strange := not_finite(self._table, self._segment(), slot):
            log.warning(
                "version %d of the weights of bridge %r has values that are not finite: %s -> "
                "engines refuse it; look at the loss of the step before",
                version,
                self.bridge,
                strange,
            )

    def _before_leaving(self) -> None:
        if self._versions is not None:
            unlock(self._versions.mapping.fd, LockByte.WRITER)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class WeightsFilling:
    """One version while it is being written. Made by `WeightsWriter.fill`; for the writer's thread.

    `ticket` is a dict of plain values for `WeightsPart.write` in the other processes.
    """

    def __init__(self, found: Versions, table: list[TensorSpec], version: int, slot: int, word: int) -> None:
        self.version = version
        self.is_open = True
        self.ticket: dict[str, Any] = {
            "segment": f"{found.segment_id:016x}",
            "filling": word,
            "version": version,
        }
        self._found, self._slot, self._base = found, slot, found.slot_at(slot)
        self._rows = {spec.name: (row, spec) for row, spec in enumerate(table)}

    def __repr__(self) -> str:
        state = "open" if self.is_open else "over"
        return f"<WeightsFilling of version {self.version}: {len(self._rows)} tensors, {state}>"

    def write(self, name: str, tensor: Any, index: Index | None = None) -> None:
        """Copies a tensor, or the shard of it that `index` (a tuple of slices into the full tensor) names.

        Blocks for the copy.

        Raises WeightsMismatch if name, type or shape differ, FillingOver after the `with` block, and in a
        child of fork.
        """
        row, spec = self._row(name)
        source = weights_tensors.as_source(name, tensor)
        size, finite = weights_tensors.write(
            self._found.mapping, self._base, spec, source, index, going_round=self._found.slot_bytes
        )
        self._count(row, size, finite)

    def write_bytes(self, name: str, at: int, source: Any) -> None:
        """Copies bytes of a tensor to byte `at` of it: of whatever type, as another segment has them.

        Blocks for the copy. `source` is a contiguous buffer.

        Raises WeightsMismatch if the segment has no such bytes, FillingOver as `write`.
        """
        row, spec = self._row(name)
        size = memoryview(source).nbytes
        if not 0 <= at <= spec.size_bytes - size:
            raise WeightsMismatch(
                f"bytes {at} to {at + size} of tensor {name!r} were given, it has {spec.size_bytes}",
                hint=_ONE_MODEL,
            )
        place, number = self._base + spec.offset + at, number_bits(spec.dtype)
        first = -at % number[0] if number else 0  # a number that two calls share is not looked at
        finite = tensor_bytes.copy_in(
            self._found.mapping, place, source, self._found.slot_bytes, number, first
        )
        self._count(row, size, finite)

    def _count(self, row: int, size: int, finite: bool) -> None:
        if not finite:
            self._found.mark_not_finite(self._slot, row)
        self._found.add_written(row, size)

    def _row(self, name: str) -> tuple[int, TensorSpec]:
        """Returns the row of a tensor that can be written now."""
        if not self.is_open or self._found.mapping.forked:
            over = f"the filling of weights version {self.version} is over, or the parent process'"
            raise FillingOver(over, hint="begin the next with fill()")
        if name not in self._rows:
            raise WeightsMismatch(f"the segment has no tensor {name!r}", hint=_ONE_MODEL)
        return self._rows[name]
