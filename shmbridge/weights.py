"""Policy weights through the bridge: a learner writes versions, inference engines read the newest complete one in place.

Two slots: the writer fills the one that is not newest, then moves one word. A slot is held by a kernel lock while it is read or filled, so
that a reader's death frees it and a writer's death leaves the last complete version. Knows tensors as bytes; knows nothing of torch beyond
how to get at them.
"""

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import msgspec
import numpy as np

from shmbridge import liveness, participation, segment
from shmbridge._ext import versions
from shmbridge._ext.header import Control
from shmbridge._ext.versions import Versions
from shmbridge.config import check_bridge_name
from shmbridge.errors import Closed, ConsumerTaken, NotReady, WeightsBusy, WeightsMismatch
from shmbridge.exits import at_exit
from shmbridge.liveness import Byte
from shmbridge.one_process import OneProcess

# How numpy carries what it has no name for.
_CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_PLAIN = frozenset(np.dtype(code).name for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
_LARGEST = 1 << 48
_ALIGNMENT = 64
_RETRY_S = 0.0005
_OVERWRITTEN = "something overwrote shared memory, or another build wrote it: publish them anew"

log = logging.getLogger(__name__)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One row of the table: where a tensor lies in every slot. `dtype` is the learner's word, such as bfloat16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


_table = msgspec.json.Decoder(list[TensorSpec])


def _as_bytes(tensor: Any) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """dtype name, shape and flat bytes of a torch tensor or an ndarray; copies only what is not contiguous or not on the host."""
    if type(tensor).__module__.split(".")[0] == "torch":
        import torch

        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy()
    array = np.ascontiguousarray(tensor)
    return array.dtype.name, np.shape(tensor), array.reshape(-1).view(np.uint8)


def _layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]], bridge: str) -> tuple[list[TensorSpec], int]:
    """The table of tensors of these names, dtypes and shapes, and the bytes of a slot; WeightsMismatch for what no reader could take."""
    table, at = [], 0
    for name, dtype, shape in tensors:
        carrier = _CARRIERS.get(dtype, dtype)
        if carrier not in _PLAIN or len(shape) > 32 or not all(0 <= size < _LARGEST for size in shape):
            raise WeightsMismatch(
                f"weights of bridge {bridge!r}: tensor {name!r} is {dtype}{list(shape)}, which no reader can take",
                hint="publish plain numbers",
            )
        size_bytes = math.prod(shape) * np.dtype(carrier).itemsize
        table.append(TensorSpec(name, dtype, shape, at, size_bytes))
        at += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
    return table, max(at, _ALIGNMENT)


def _read_table(found: Versions, bridge: str) -> list[TensorSpec]:
    """The table of a segment; WeightsMismatch unless it is what a writer of these names, dtypes and shapes would have written."""
    try:
        table = _table.decode(found.table)
    except (msgspec.MsgspecError, ValueError, RecursionError) as wrong:
        raise WeightsMismatch(f"the weights of bridge {bridge!r} have no table: {wrong}", hint=_OVERWRITTEN) from None
    expected, slot_bytes = _layout([(spec.name, spec.dtype, spec.shape) for spec in table], bridge)
    if table != expected or found.slot_at(1) - found.slot_at(0) != slot_bytes:
        raise WeightsMismatch(f"the weights of bridge {bridge!r} do not lie where their table says", hint=_OVERWRITTEN)
    return table


class WeightsWriter(OneProcess):
    """The one writer of a bridge's weights. For one thread; a context manager.

    Takes over the segment a dead writer left. Raises ConsumerTaken if another writer is alive.
    """

    def __init__(self, bridge: str) -> None:
        self.bridge = check_bridge_name(bridge)
        self._control: Control | None = participation.open_control(bridge)
        self._table: list[TensorSpec] = []
        self._versions: Versions | None = None
        self._no_exit_call = at_exit(self.close)
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        mapping = segment.open_mapping(segment.weights_name(self.bridge), minimum=versions.header_bytes)
        if mapping is None:
            return
        if not liveness.lock_exclusive(mapping.fd, Byte.WRITER):
            raise ConsumerTaken(
                f"the weights of bridge {self.bridge!r} have a living writer", hint="one learner writes weights: end the other"
            )
        if not segment.still_named(mapping.fd, segment.weights_name(self.bridge)):
            return  # another writer removed it just before; what this one publishes makes it anew
        found = Versions(mapping)
        if not found.ready:
            return
        try:
            self._table = _read_table(found, self.bridge)
        except WeightsMismatch as remains:
            log.warning("%s: they are made anew", remains.message)
        else:
            self._versions = found

    @property
    def last_version(self) -> int | None:
        """The newest complete version in the segment, also an earlier writer's; None if there is none."""
        latest = self._versions.latest if self._versions is not None else None
        return None if latest is None else int(latest[0])

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]], *, timeout_s: float = 30.0) -> None:
        """Copies the tensors into the free slot and makes them the newest version.

        Blocks for the copy, and while a reader still holds the slot, at most `timeout_s` seconds.

        Args:
            version: policy version, above `last_version`.
            tensors: (name, torch tensor or ndarray) in a fixed order; names, dtypes and shapes stay the same over versions.
            timeout_s: seconds.

        Raises:
            WeightsMismatch: the tensors are not those of the table; names the first that differs.
            WeightsBusy: a reader held the slot for too long; the last version stays.
            ValueError: the version does not rise.
        """
        if self._control is None:
            raise Closed("this weights writer is closed")
        last = self.last_version
        if last is not None and version <= last:
            raise ValueError(f"weights version {version} is not after {last}: versions of one bridge only rise")
        flat = [(name, *_as_bytes(tensor)) for name, tensor in tensors]
        table, slot_bytes = _layout([each[:3] for each in flat], self.bridge)
        self._fit(table, slot_bytes)
        assert self._versions is not None
        latest = self._versions.latest
        slot = 0 if latest is None else (latest[1] + 1) % versions.slots
        self._hold(slot, timeout_s)
        try:
            self._versions.begin(slot)
            memory = np.frombuffer(memoryview(self._versions.mapping), np.uint8)
            base = self._versions.slot_at(slot)
            for spec, (*_, raw) in zip(table, flat, strict=True):
                memory[base + spec.offset : base + spec.offset + spec.size_bytes] = raw
            self._versions.commit(slot, version)
        finally:
            liveness.unlock(self._versions.mapping.fd, Byte.FIRST_SLOT + slot)

    def _fit(self, table: list[TensorSpec], slot_bytes: int) -> None:
        """Makes the segment for the first version; later ones must match it. A dead writer's other model makes room for ours."""
        if self._versions is not None and self._table == table:
            return
        if self._versions is not None and self._versions.mapping.size and self._wrote_here:
            raise WeightsMismatch(_first_difference(self._table, table), hint="one bridge carries one model: use another bridge")
        if self._versions is not None:
            liveness.unlock(self._versions.mapping.fd, Byte.WRITER)
            self._versions = None
        segment.remove_weights(self.bridge)
        raw = msgspec.json.encode(table)
        page = versions.header_bytes
        data_at = -(-(page + len(raw)) // page) * page
        mapping = segment.create_weights(self.bridge, data_at + versions.slots * slot_bytes)
        if mapping is None:
            raise NotReady(
                f"the weights segment of bridge {self.bridge!r} is being made by somebody else", hint="one learner writes weights"
            )
        self._versions = Versions(mapping)
        self._versions.format(os.getpid(), raw, slot_bytes)
        self._table, self._wrote_here = table, True

    _wrote_here = False

    def _hold(self, slot: int, timeout_s: float) -> None:
        assert self._versions is not None
        deadline = time.monotonic() + timeout_s
        while not liveness.lock_exclusive(self._versions.mapping.fd, Byte.FIRST_SLOT + slot):
            if time.monotonic() > deadline:
                raise WeightsBusy(
                    f"a reader has held slot {slot} of the weights of bridge {self.bridge!r} for more than {timeout_s:.0f} s",
                    hint="a reader keeps a lease open: copy the tensors and leave the `with` block",
                )
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Leaves; the last version stays readable as long as anybody takes part in the bridge. Idempotent."""
        if self._control is None:
            return
        if self._versions is not None:
            liveness.unlock(self._versions.mapping.fd, Byte.WRITER)
        self._no_exit_call()
        control, self._control = self._control, None
        participation.leave(control.mapping.fd, self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _first_difference(here: list[TensorSpec], there: list[TensorSpec]) -> str:
    for mine, given in zip(here, there, strict=False):
        if mine != given:
            ours, theirs = (f"{spec.name!r} {spec.dtype}{list(spec.shape)}" for spec in (mine, given))
            return f"tensor {theirs} was given, the segment has {ours}"
    return f"{len(there)} tensors given, the segment has {len(here)}"


class WeightsLease:
    """One version, held still. `tensors` are read-only views, valid inside the `with` block only: copy them into the model there."""

    def __init__(self, found: Versions, version: int, slot: int, table: list[TensorSpec]) -> None:
        self.version = version
        self.dtypes = {spec.name: spec.dtype for spec in table}
        memory = memoryview(found.mapping).toreadonly()
        base = found.slot_at(slot)
        self.tensors: Mapping[str, np.ndarray[Any, Any]] = {spec.name: _view(memory, base, spec) for spec in table}


def _view(memory: memoryview, base: int, spec: TensorSpec) -> np.ndarray[Any, Any]:
    dtype = np.dtype(_CARRIERS.get(spec.dtype, spec.dtype))
    return np.frombuffer(memory, dtype, math.prod(spec.shape), base + spec.offset).reshape(spec.shape)


class WeightsReader(OneProcess):
    """Reads the newest weights of a bridge. Never waits for a writer to exist; follows one that is replaced. For one thread.

    `version` and `lease` raise WeightsMismatch for a segment whose table cannot be what a writer wrote.
    """

    def __init__(self, bridge: str) -> None:
        self.bridge = check_bridge_name(bridge)
        self._control: Control | None = participation.open_control(bridge)
        self._versions: Versions | None = None
        self._table: list[TensorSpec] = []
        self._no_exit_call = at_exit(self.close)

    @property
    def version(self) -> int | None:
        """The newest complete version, None before the first. Never blocks."""
        found = self._current()
        latest = found.latest if found is not None else None
        return None if latest is None else int(latest[0])

    def _current(self) -> Versions | None:
        """The mapped segment, mapped anew if another took its name."""
        name = segment.weights_name(self.bridge)
        if self._versions is not None and segment.still_named(self._versions.mapping.fd, name):
            return self._versions
        self._versions = None
        mapping = segment.open_mapping(name, minimum=versions.header_bytes)
        if mapping is not None and (found := Versions(mapping)).ready:
            self._table = _read_table(found, self.bridge)
            self._versions = found
        return self._versions

    @contextmanager
    def lease(self, *, timeout_s: float = 5.0) -> Iterator[WeightsLease]:
        """Holds the newest version still for the `with` block; one at a time per reader.

        Blocks until there is a version, at most `timeout_s` seconds, then NotReady. A long lease makes the writer wait
        with its second next version.
        """
        deadline = time.monotonic() + timeout_s
        while (held := self._try_hold()) is None:
            if time.monotonic() > deadline:
                raise NotReady(f"no weights on bridge {self.bridge!r} within {timeout_s} s", hint="has the learner published a version?")
            time.sleep(_RETRY_S)
        found, version, slot = held
        try:
            yield WeightsLease(found, version, slot, self._table)
        finally:
            liveness.unlock(found.mapping.fd, Byte.FIRST_SLOT + slot)

    def _try_hold(self) -> tuple[Versions, int, int] | None:
        found = self._current()
        latest = found.latest if found is not None else None
        if found is None or latest is None:
            return None
        version, slot = latest
        if not liveness.lock_shared(found.mapping.fd, Byte.FIRST_SLOT + slot):
            return None
        if found.holds(slot, version):
            return found, version, slot
        liveness.unlock(found.mapping.fd, Byte.FIRST_SLOT + slot)  # the writer came round in between
        return None

    def close(self) -> None:
        """Leaves the bridge. Idempotent."""
        if self._control is None:
            return
        self._versions = None
        self._no_exit_call()
        control, self._control = self._control, None
        participation.leave(control.mapping.fd, self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
