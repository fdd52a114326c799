"""Weights on their way to other nodes: read on the learner's node in parts, and written on each other node
into its own weights segment.

A version is whole on a node or not there: a relay that dies while it writes one leaves the version before.
"""

import bisect
import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator
from typing import Any, Self

import msgspec
import numpy as np

from shmbridge._ext import weights as versions
from shmbridge.errors import FillingOver, LayoutMismatch, NotReady, WeightsMismatch
from shmbridge.weights import TensorSpec, WeightsFilling, WeightsReader, WeightsWriter

Array = np.ndarray[Any, Any]

PART_BYTES = 16 << 20
_ONE_RELEASE = "run one release of shmbridge on all nodes"
_LOOK_S = 0.25  # for the first version
_BUSY_S = 5.0  # an engine that still reads the version before the last


class Head(msgspec.Struct, frozen=True):
    """What a node needs to know before the parts of a version.

    Attributes:
        transfer: random, of one reading of the version.
        version: of the policy.
        layout: of weights segments on the learner's node.
        slot_bytes: of the version.
        part_bytes: of each part but the last.
        tensors: the learner's table.
    """

    transfer: str
    version: int
    layout: int
    slot_bytes: int
    part_bytes: int
    tensors: list[TensorSpec]

    @property
    def parts(self) -> int:
        """How many parts the version has."""
        return -(-self.slot_bytes // self.part_bytes)


def encode_head(head: Head) -> bytes:
    """Returns the bytes of a head, which another node decodes."""
    return msgspec.msgpack.encode(head)


def decode_head(raw: bytes) -> Head:
    """Returns a head. Raises WeightsMismatch for anything else, LayoutMismatch for another layout's."""
    try:
        head = msgspec.msgpack.decode(raw, type=Head)
    except msgspec.MsgspecError as wrong:
        raise WeightsMismatch(
            f"what a relay sent is no head of weights: {wrong}", hint=_ONE_RELEASE
        ) from None
    if head.layout != versions.layout_version:
        raise LayoutMismatch(
            f"a relay sends weights of layout {head.layout}, and this node has {versions.layout_version}",
            hint=_ONE_RELEASE,
        )
    return head


class Offer:
    """One version, read under a lease: its head and, while the lease lasts, its parts as flat views of it."""

    def __init__(self, head: Head, slot: memoryview) -> None:
        self.head = head
        self._slot = slot

    def part(self, number: int) -> Array:
        """Returns a part: read-only bytes in the segment."""
        begin = number * self.head.part_bytes
        return np.frombuffer(self._slot[begin : begin + self.head.part_bytes], np.uint8)


class WeightsSender:
    """Reads the weights of a bridge for other nodes; a context manager. For one thread.

    Args:
        bridge: name of the bridge on the learner's node.
        part_bytes: of a part.

    Raises as WeightsReader.
    """

    def __init__(self, bridge: str, part_bytes: int = PART_BYTES) -> None:
        self._reader = WeightsReader(bridge)
        self._part_bytes = part_bytes

    @property
    def version(self) -> int:
        """The newest whole version; -1 before the first. Never blocks."""
        version = self._reader.version
        return -1 if version is None else version

    def wait(self, after: int, timeout_s: float) -> bool:
        """Blocks until the newest version is not `after`; returns False after `timeout_s` seconds.

        The first version is heard of a quarter of a second late: there is no segment to sleep in.
        """
        until = time.monotonic() + timeout_s
        while self.version < 0 and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
        try:
            self._reader.wait(None if after < 0 else after, max(until - time.monotonic(), 0.0))
        except NotReady:
            return False
        return True

    @contextlib.contextmanager
    def read(self) -> Iterator[Offer]:
        """Leases the newest version for the `with` block. Raises NotReady without one."""
        with self._reader.lease() as lease:
            head = Head(
                secrets.token_hex(8),
                lease.version,
                versions.layout_version,
                len(lease.slot),
                self._part_bytes,
                lease.specs,
            )
            yield Offer(head, lease.slot)

    def close(self) -> None:
        """Leaves the bridge. Idempotent."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Abandoned(Exception):
    """Ends a filling that is not to be committed."""


class WeightsReceiver:
    """Writes the weights of another node into a bridge's segment here; a context manager. For one thread.

    It is the one writer of this bridge's weights: raises ConsumerTaken if another is alive, LayoutMismatch if
    something overwrote the bridge's control segment.
    """

    def __init__(self, bridge: str) -> None:
        self.bridge = bridge
        self._writer = WeightsWriter(bridge)
        self._head: Head | None = None
        self._filling: WeightsFilling | None = None
        self._ends = contextlib.ExitStack()
        self._model: set[tuple[str, str, tuple[int, ...]]] | None = None  # tensors of all its versions
        self._begins: list[int] = []  # of the tensors, in the learner's segment

    @property
    def version(self) -> int:
        """The newest whole version; -1 before the first. Never blocks."""
        last = self._writer.last_version
        return -1 if last is None else last

    def begin(self, head: Head) -> bool:
        """Begins to write a version, in place of one under way; returns False if it is there, or a later one.

        Blocks while an engine reads the version before the last, at most some seconds, then WeightsBusy.

        Raises ShmTooSmall, LayoutMismatch; WeightsMismatch for a head that no reader can have made.
        """
        self.abandon()
        if head.version <= self.version:
            return False
        self._begins = [spec.offset for spec in head.tensors]
        if head.part_bytes <= 0 or self._begins != sorted(self._begins):
            raise WeightsMismatch("what a relay sent is no head of weights", hint=_ONE_RELEASE)
        model = [(spec.name, spec.dtype, spec.shape) for spec in head.tensors]
        if self._model is not None and self._model != set(model):
            self._begin_again()
        self._filling = self._ends.enter_context(self._writer.fill(head.version, model, timeout_s=_BUSY_S))
        self._model = set(model)
        self._head = head
        return True

    def write(self, transfer: str, number: int, part: Array) -> None:
        """Copies a part, each once, in any order. Blocks for the copy.

        Raises FillingOver unless that transfer is under way, WeightsMismatch for a part it does not have.
        """
        head, filling = self._under_way(transfer)
        begin = number * head.part_bytes
        end = begin + len(part)
        if len(part) != max(min(head.part_bytes, head.slot_bytes - begin), 0) or number < 0:
            raise WeightsMismatch(
                f"part {number} of {head.parts} of weights version {head.version} has {len(part)} bytes",
                hint=_ONE_RELEASE,
            )
        row = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        for spec in itertools.islice(head.tensors, row, None):
            first, last = max(spec.offset, begin), min(spec.offset + spec.size_bytes, end)
            if spec.offset >= end:
                return
            if first < last:  # the segment here may have the tensors in another order
                filling.write_bytes(spec.name, first - spec.offset, part[first - begin : last - begin])

    def commit(self, transfer: str) -> int:
        """Makes the version the newest here, and returns it.

        Raises WeightsMismatch if parts are missing or came twice: the version before stays; FillingOver.
        """
        head, _ = self._under_way(transfer)
        self._head = self._filling = None
        self._ends.close()
        return head.version

    def abandon(self) -> None:
        """Ends what is under way without a version."""
        self._head = self._filling = None
        with contextlib.suppress(_Abandoned), self._ends:
            raise _Abandoned

    def close(self) -> None:
        """Leaves the bridge; the last whole version stays. Idempotent."""
        self.abandon()
        self._writer.close()

    def _begin_again(self) -> None:
        """Becomes another writer, as one writes one model; the bridge keeps a participant meanwhile."""
        with WeightsReader(self.bridge):
            self._writer.close()
            self._writer = WeightsWriter(self.bridge)

    def _under_way(self, transfer: str) -> tuple[Head, WeightsFilling]:
        head, filling = self._head, self._filling
        if head is None or filling is None or head.transfer != transfer:
            raise FillingOver(
                f"transfer {transfer} of weights to bridge {self.bridge!r} is over", hint="begin it again"
            )
        return head, filling

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
