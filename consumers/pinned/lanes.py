"""Lanes registered with CUDA, so that a device reads a ring's memory itself, by asynchronous copies and
without a host pass.

Each lane is registered once, at its first record, in pieces, and unregistered when its segment is gone. A
lane that cannot be registered (a limit of locked memory, an old driver, no device) is copied more slowly,
which is logged once.

Used by `device_batch.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.pinned.driver import Driver
from shmbridge.record import lane_memory, lane_name, map_lane_writable

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
_SEGMENTS = "/dev/shm"


@dataclass
class _Pinned:
    memory: memoryview  # keeps the lane mapped as long as any of it is registered
    address: int
    pieces: list[int] = field(default_factory=list)  # addresses of what is registered


class PinnedLanes:
    """The lanes that were registered. For one thread at a time.

    Args:
        driver: what registers; None: nothing is, and all copies go the slow way.
        piece_bytes: most bytes of one registration, a multiple of the page size.
    """

    def __init__(self, driver: Driver | None, piece_bytes: int = PIECE_BYTES) -> None:
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._lanes: dict[str, _Pinned] = {}
        self._refused = False

    @property
    def bytes(self) -> int:
        """Registered bytes."""
        return sum(
            min(self._piece_bytes, lane.address + lane.memory.nbytes - piece)
            for lane in self._lanes.values()
            for piece in lane.pieces
        )

    def pin(self, record: shmbridge.Record) -> None:
        """Registers the lane of a record, unless that was tried before.

        Blocks: every page of the lane is locked. Never raises.
        """
        name = lane_name(record)
        if self._driver is None or name in self._lanes:
            return
        if not self._driver.takes_read_only():
            map_lane_writable(record)
        memory = lane_memory(record)
        lane = _Pinned(memory, np.frombuffer(memory, np.uint8).ctypes.data)
        self._lanes[name] = lane
        for at in range(0, memory.nbytes, self._piece_bytes):
            refused = self._driver.register(lane.address + at, min(self._piece_bytes, memory.nbytes - at))
            if refused:
                if not self._refused:
                    log.warning(
                        "CUDA (error %d) does not register lane %s from byte %d of %d: copies from "
                        "there are slower (ulimit -l, or the container's limit of locked memory?)",
                        refused,
                        name,
                        at,
                        memory.nbytes,
                    )
                self._refused = True
                return
            lane.pieces.append(lane.address + at)

    def cut(self, record: shmbridge.Record, values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        """Yields a record's flat values so that no part crosses the border of two registrations: a copy may
        not.
        """
        lane = self._lanes.get(lane_name(record))
        if lane is None or not lane.pieces:
            yield values
            return
        item, start, done = values.itemsize, values.ctypes.data - lane.address, 0
        while done < len(values):
            to_border = self._piece_bytes - (start + done * item) % self._piece_bytes
            count = min(len(values) - done, max(1, to_border // item))
            yield values[done : done + count]
            done += count

    def forget_gone(self, wait_for_copies: Callable[[], None]) -> None:
        """Unregisters lanes whose segment is gone, which would stay locked in memory.

        A name can also be removed by force, while a copy reads the lane: if there are such lanes, blocks for
        `wait_for_copies` first.
        """
        gone = [name for name in self._lanes if not os.path.exists(_SEGMENTS + name)]
        if gone:
            wait_for_copies()
        for name in gone:
            self._let_go(name)

    def close(self) -> None:
        """Unregisters every lane. No copy may be in flight. Idempotent."""
        for name in list(self._lanes):
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        lane = self._lanes.pop(name)
        for piece in lane.pieces:
            if self._driver is not None and (refused := self._driver.unregister(piece)):
                log.warning("CUDA (error %d) does not let go of lane %s", refused, name)
