"""The lane here of one producer on another node: opened for its first record, closed at its end."""

import contextlib
import logging
import time
from collections import deque
from dataclasses import replace

import numpy as np

from shmbridge import Producer
from shmbridge.errors import (
    BridgeDraining,
    LaneFull,
    LaneQuarantined,
    LaneRefused,
    LaneRemoved,
    RecordTooBig,
    SchemaMismatch,
    ShmBridgeError,
)
from shmbridge.put import LaneOrigin, RelayedRecord
from shmbridge.relay.wire import SourceLane
from shmbridge.schema import STANDARD, Columns, arrow_field
from shmbridge.sizing import SMALLEST_LANE

log = logging.getLogger(__name__)

_RECORDS = 8  # of the size of its first one, at least
_AGAIN_S = 1.0  # after it could not be opened


class RelayedLane:
    """The records of one source here, in their order, and those that have no room yet. One thread.

    Args:
        bridge: name of the bridge here.
        node: name of the source's node.
        source: what its records share.
        lane_bytes: most for the lane, unless a record needs more.
    """

    def __init__(self, bridge: str, node: str, source: SourceLane, lane_bytes: int) -> None:
        self.node, self.source = node, source
        self._bridge, self._lane_bytes = bridge, lane_bytes
        self._producer: Producer | None = None
        self._waiting: deque[RelayedRecord] = deque()
        self._not_before_s = 0.0
        self.waiting_bytes = 0
        self.unread = ""  # why the hub will not read it
        self.wrong = ""  # why its last record was refused, or it cannot be opened

    @property
    def name(self) -> str:
        """Name of its segment; "" before it is open."""
        return "" if self._producer is None else self._producer.lane_name

    @property
    def is_open(self) -> bool:
        """Whether it can take a record."""
        return self._producer is not None

    @property
    def free_bytes(self) -> int | None:
        """Bytes that may be sent for it, below 0 for too many; None before its size is known."""
        if self._producer is None:
            return 0 if self._waiting else None
        return self._producer.free_bytes - self.waiting_bytes

    # -- records

    @property
    def first_waiting(self) -> RelayedRecord | None:
        """The record that is put next, of those that had no room."""
        return self._waiting[0] if self._waiting else None

    @property
    def waiting(self) -> int:
        """How many records had no room."""
        return len(self._waiting)

    @property
    def newest_waiting(self) -> int:
        """The sequence at its source of the last record that had no room; -1 if none waits."""
        return self._waiting[-1].sequence if self._waiting else -1

    def keep(self, record: RelayedRecord) -> None:
        """Copies a record that has no room yet, so that its parcel is let go."""
        extent = np.frombuffer(record.extent, np.uint8)
        self._waiting.append(replace(record, extent=extent.copy()))
        self.waiting_bytes += len(extent)

    def next_waiting(self) -> None:
        """The first waiting record is put, or refused."""
        self.waiting_bytes -= len(self._waiting.popleft().extent)

    def forget_waiting(self) -> None:
        """Drops what waits: its source sends it again."""
        self._waiting.clear()
        self.waiting_bytes = 0

    def put(self, record: RelayedRecord) -> bool:
        """Commits a record; returns False if it has to wait. Never blocks.

        Raises InvalidRecord, SchemaMismatch for what can never be put.
        """
        if self._producer is None:
            return False
        try:
            self._producer.put(record, timeout_s=0)
        except (LaneFull, BridgeDraining):
            return False
        except RecordTooBig:
            self.let_go()  # a larger one follows, once the hub has taken all of this one
            return False
        except (LaneQuarantined, LaneRemoved) as wrong:
            log.error("%s", wrong)
            self.let_go()
            return False
        return True

    def refusal(self) -> LaneRefused:
        """Returns the error for records of a lane that the hub will not read."""
        return LaneRefused(
            f"the consumer here reads nothing of the lane of {self.source.producer_id}: {self.unread}",
            hint="records before these are in the lane, for the next consumer; mend what it names",
        )

    # -- its producer

    def open(self, size: int, newest: int | None) -> bool:
        """Opens it for a record of so many bytes, after `newest`; returns False if that must be tried again.

        Raises SchemaMismatch.
        """
        if time.monotonic() < self._not_before_s:
            return False
        source = self.source
        lane_bytes = max(min(self._lane_bytes, source.lane_bytes), _RECORDS * size, SMALLEST_LANE)
        try:
            self._producer = self._opened(lane_bytes, newest)
        except SchemaMismatch:
            raise
        except ShmBridgeError as wrong:
            log.error("no lane for %s of %s: %s", source.producer_id, self.node, wrong)
            self._not_before_s = time.monotonic() + _AGAIN_S
            self.wrong = str(wrong)
            return False
        return True

    def _opened(self, lane_bytes: int, newest: int | None) -> Producer:
        import pyarrow as pa

        columns = Columns.decode(self.source.table).order
        own = [arrow_field(column) for column in columns if column.name not in STANDARD]
        return Producer(
            self._bridge,
            self.source.env_name,
            lane_bytes,
            schema=pa.schema(own) if own else None,
            producer_id=self.source.producer_id.rpartition("-")[0][:63] or None,
            origin=LaneOrigin(self.node, self.source.producer_id, newest),
        )

    def let_go(self) -> None:
        """Closes its producer; records and origin stay, and a next lane may follow. Idempotent."""
        producer, self._producer, self.unread = self._producer, None, ""
        if producer is not None:
            with contextlib.suppress(ShmBridgeError):
                producer.close()

    def finish(self) -> None:
        """Closes it: its source will send nothing again."""
        if self._producer is not None:
            with contextlib.suppress(ShmBridgeError):
                self._producer.close_origin()
        self.let_go()
