"""Readers of a bridge's weights: the newest complete version, unchanged under a lease.

A reader's death frees its slot; a writer's death leaves the present versions.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from shmbridge._ext import header
from shmbridge._ext import weights as versions
from shmbridge._ext.weights import Versions
from shmbridge.config import check_bridge_name, check_timeout, check_version, deadline_of
from shmbridge.errors import NotReady, WeightsMismatch
from shmbridge.segments import LockByte, lock_shared, still_named, unlock, weights_name
from shmbridge.weights.table import (
    Array,
    TensorSpec,
    WeightsEnd,
    carrier,
    not_finite,
    open_weights_segment,
    read_table,
    view,
)

_RETRY_S = 0.0005
_LOOK_S = 0.01  # interval of looking for a segment that does not exist yet
# interval of checking for a replaced segment, and for versions of a writer that died before its ring
_TICK_S = 0.25


class WeightsLease:
    """One version, unchanged while leased.

    `tensors` are read-only views, valid inside the `with` block only: copy them into the model there.

    Never blocks. `dtypes` has the learner's type names; bfloat16 and float8 come as uint16 and uint8.
    `slot` is the memory of all tensors, each at its `offset` in `specs`; read-only, valid as `tensors` are.
    """

    def __init__(
        self, found: Versions, version: int, slot: int, table: list[TensorSpec], comparable_from: int
    ) -> None:
        self.version = version
        self.specs = table
        self.dtypes = {spec.name: spec.dtype for spec in table}
        memory = memoryview(found.mapping).toreadonly()
        base = found.slot_at(slot)
        self.slot = memory[base : base + found.slot_bytes]
        self.tensors: Mapping[str, Array] = {spec.name: view(memory, base, spec) for spec in table}
        self._stamps = found.stamps(slot)
        self._not_finite = not_finite(table, found, slot)
        self._comparable_from = comparable_from

    def __repr__(self) -> str:
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        return f"<WeightsLease of version {self.version}: {len(self.tensors)} tensors, {size} bytes>"

    def require_finite(self) -> None:
        """Raises WeightsMismatch if the writer found NaN or an infinity among the values. Never blocks.

        For what loads a version into a model: the bridge carries any values.
        """
        if self._not_finite:
            raise WeightsMismatch(
                f"version {self.version} of the weights has values that are not finite: {self._not_finite}",
                hint="look at the learner's loss and gradients of the step before",
            )

    def changed_since(self, version: int) -> frozenset[str]:
        """Returns the names of the tensors that were written after that version; all names if unknown, for
        example for a version of another segment.
        """
        stamps = self._stamps.tolist()
        if not self._comparable_from <= version <= self.version or not all(
            0 < stamp <= self.version + 1 for stamp in stamps
        ):
            return frozenset(self.dtypes)
        return frozenset(
            spec.name for spec, stamp in zip(self.specs, stamps, strict=True) if stamp > version + 1
        )


class WeightsReader(WeightsEnd):
    """Reads the newest weights of a bridge. Never waits for a writer to exist; follows one that is replaced.

    For one thread.

    All methods but `close` raise WeightsMismatch for a segment whose table no writer can have written.
    `late_wakes` counts versions that were found without a ring: 0 in a healthy run.
    """

    _called = "weights reader"

    def __init__(self, bridge: str) -> None:
        super().__init__(bridge)
        self._table: list[TensorSpec] = []
        self._segments = 0  # mapped so far; versions of earlier segments are not compared
        self._comparable_from = 0
        self._told = 1  # the segment that `wait` or `lease` reported last
        self._holds: set[_Hold] = set()
        self.late_wakes = 0

    @property
    def version(self) -> int | None:
        """The newest complete version, None before the first. Never blocks."""
        found = self._current()
        latest = found.latest if found is not None else None
        return None if latest is None else int(latest[0])

    def _current(self) -> Versions | None:
        """Returns the mapped segment; maps it again if another took its name."""
        self._require_open()
        name = weights_name(self.bridge)
        if self._versions is not None and still_named(self._versions.mapping.fd, name):
            return self._versions
        self._versions = None
        if (found := open_weights_segment(self.bridge)) is not None:
            self._table = read_table(found, self.bridge)
            self._versions = found
            self._segments += 1
            self._comparable_from = 0
        return self._versions

    def wait(self, after: int | None, timeout_s: float) -> int:
        """Blocks until the newest version differs from `after`, and returns it; any version if `after` is
        None.

        The same number in another segment than that of the last `wait` or `lease` counts as another
        version. Sleeps until the writer rings, with the GIL released. Raises NotReady after `timeout_s`
        seconds.
        """
        if (latest := self._await(after, deadline_of(check_timeout(timeout_s)))) is None:
            newer = "" if after is None else f" but {after}"
            raise NotReady(
                f"no weights on bridge {self.bridge!r}{newer} within {timeout_s} s",
                hint="does the learner still publish?",
            )
        return latest

    def _await(self, after: int | None, deadline: float) -> int | None:
        """As `wait`; None on timeout."""
        nobody_rang, slept_in = False, None
        while True:
            found = self._current()
            seen = 0 if found is None else found.bell
            latest = None if found is None else found.latest
            if latest is not None and (latest[0] != after or self._told < self._segments):
                self._told = self._segments
                self.late_wakes += nobody_rang and found is slept_in
                return int(latest[0])
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if found is None:
                time.sleep(min(left, _LOOK_S))
            else:
                slept_in = found
                nobody_rang = found.wait_bell(seen, int(min(left, _TICK_S) * 1e9))

    @contextmanager
    def lease(self, *, version: int | None = None, timeout_s: float = 5.0) -> Iterator[WeightsLease]:
        """Keeps a version unchanged for the `with` block: the newest, or the given one.

        Blocks until there is a version, at most `timeout_s` seconds, then NotReady; raises at once if there
        are others, and not the given one. A long lease makes the writer wait with its second next version;
        while the lease lasts, that version can be leased by number.
        """
        version = None if version is None else check_version("version", version)
        hold = _Hold()
        try:
            found, held, slot = self._take(hold, version, deadline_of(check_timeout(timeout_s)), timeout_s)
            header.fault(b"weights.leased")
            self._told = self._segments
            comparable_from = self._comparable_from
            # Its versions may repeat the numbers of earlier segments.
            if self._segments > 1 and not comparable_from:
                self._comparable_from, comparable_from = held, held + 1
            yield WeightsLease(found, held, slot, self._table, comparable_from)
        finally:
            try:
                self._let_go(hold)
            except BaseException:
                # A signal handler's exception; handled in place, since it could come before a called function
                # begins its try.
                self._let_go(hold)
                raise

    def _take(
        self, hold: "_Hold", wanted: int | None, deadline: float, timeout_s: float
    ) -> tuple[Versions, int, int]:
        while (held := self._try_hold(hold, wanted)) is None:
            if time.monotonic() > deadline:
                if (newest := self.version) is not None:
                    said = (
                        f"version {newest} of the weights of bridge {self.bridge!r} is locked by its "
                        f"writer, for more than {timeout_s} s"
                    )
                    raise NotReady(said, hint="look for a stopped learner: ps -eo pid,stat,cmd")
                raise NotReady(
                    f"no weights on bridge {self.bridge!r} within {timeout_s} s",
                    hint="has the learner published a version?",
                )
            time.sleep(_RETRY_S)
        return held

    def _try_hold(self, hold: "_Hold", wanted: int | None) -> tuple[Versions, int, int] | None:
        found = self._current()
        latest = found.latest if found is not None else None
        if found is None or latest is None:
            return None
        version, slot = latest
        if wanted is not None:
            if not (slots := [each for each in range(versions.slots) if found.holds(each, wanted)]):
                raise NotReady(
                    f"version {wanted} of the weights of bridge {self.bridge!r} was asked for, the segment "
                    f"holds {version}",
                    hint="ask for the newest version",
                )
            version, slot = wanted, slots[0]
        # Record the hold before locking, so that an exception from a signal handler still unlocks it.
        hold.found, hold.slot = found, slot
        self._holds.add(hold)
        if lock_shared(found.mapping.fd, LockByte.FIRST_SLOT + slot) and found.holds(slot, version):
            return found, version, slot
        self._let_go(hold)  # the writer reused the slot in between
        return None

    def _let_go(self, hold: "_Hold") -> None:
        """Ends one lease; the slot's lock ends with its last lease, since the kernel sees all leases of this
        reader as one.

        Idempotent.

        Does nothing in a child of fork, where the lease is the parent's.
        """
        self._holds.discard(hold)
        others = [each for each in self._holds if each.found is hold.found and each.slot == hold.slot]
        if (found := hold.found) is not None and not others and not found.mapping.forked:
            unlock(found.mapping.fd, LockByte.FIRST_SLOT + hold.slot)

    def copy(
        self, into: Mapping[str, Array] | None = None, *, timeout_s: float = 5.0
    ) -> tuple[int, dict[str, Array]]:
        """Copies the newest version under a lease: (version, tensors by name).

        Blocks for the copy, and until there is a version, at most `timeout_s` seconds, then NotReady.

        Args:
            into: writable arrays of an earlier copy, filled again and returned; incomplete if this raises.
            timeout_s: seconds.

        Raises WeightsMismatch, which names the first tensor of `into` that does not fit.
        """
        with self.lease(timeout_s=timeout_s) as lease:
            copied = {
                spec.name: np.empty_like(lease.tensors[spec.name]) if into is None else _fitting(into, spec)
                for spec in lease.specs
            }
            for name, to in copied.items():
                np.copyto(to, lease.tensors[name])
            return lease.version, copied


@contextmanager
def lease_from_outside(bridge: str) -> Iterator[WeightsLease]:
    """Leases the newest version, as `WeightsReader.lease`, without becoming a participant. Never blocks.

    For a bridge in which nobody may live: the last participant that leaves one removes it.

    Raises NotReady if there is no version, or a writer is replacing it.
    """
    found = open_weights_segment(check_bridge_name(bridge))
    latest = None if found is None else found.latest
    if found is None or latest is None:
        raise NotReady(f"bridge {bridge!r} has no weights", hint="has the learner published a version?")
    version, slot = latest
    byte = LockByte.FIRST_SLOT + slot
    try:
        if not (lock_shared(found.mapping.fd, byte) and found.holds(slot, version)):
            raise NotReady(
                f"version {version} of the weights of bridge {bridge!r} is being replaced by its writer",
                hint="end that writer, or try again",
            )
        yield WeightsLease(found, version, slot, read_table(found, bridge), 0)
    finally:
        if not found.mapping.forked:
            unlock(found.mapping.fd, byte)


class _Hold:
    """The segment and slot that one lease holds, or is about to."""

    found: Versions | None = None
    slot = 0


def _fitting(into: Mapping[str, Array], spec: TensorSpec) -> Array:
    to = into.get(spec.name)
    if (
        to is None
        or to.shape != spec.shape
        or to.dtype != carrier(spec.dtype)
        or not (to.flags.c_contiguous and to.flags.writeable)
    ):
        there = "nothing" if to is None else f"{to.dtype.name}{list(to.shape)}"
        raise WeightsMismatch(
            f"tensor {spec.name!r} {spec.dtype}{list(spec.shape)} is to be copied into {there}",
            hint="give writable arrays in one piece, as an earlier copy() returned them",
        )
    return to
