"""Shared memory registered with CUDA: a device reads and writes it at the speed of pinned memory."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

import shmbridge
from shmbridge.record import lane_memory, lane_name, map_lane_writable
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

log = logging.getLogger(__name__)

_PORTABLE, _READ_ONLY = 1, 8  # for all contexts; the device only reads
_READ_ONLY_REGISTERED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED


class Driver(Protocol):
    """The interface of the CUDA driver that registers memory."""

    def takes_read_only(self) -> bool:
        """Whether it registers memory that may only be read."""
        ...

    def register(self, address: int, size: int, *, written: bool = False) -> int:
        """Registers page-aligned memory, which the device reads, or also writes; 0, or the driver's error."""
        ...

    def unregister(self, address: int) -> int:
        """Undoes that; 0, or the driver's error."""
        ...


class CudaDriver:
    """The driver of this machine. The calling thread needs a current context.

    Raises:
        OSError: there is none.
    """

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._cuda.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._cuda.cuMemHostUnregister.argtypes = [ctypes.c_void_p]

    def takes_read_only(self) -> bool:
        """As `Driver`; False if the driver does not say."""
        device, answer = ctypes.c_int(), ctypes.c_int()
        if self._cuda.cuCtxGetDevice(ctypes.byref(device)):
            return False
        refused = self._cuda.cuDeviceGetAttribute(ctypes.byref(answer), _READ_ONLY_REGISTERED, device)
        return not refused and answer.value == 1

    def register(self, address: int, size: int, *, written: bool = False) -> int:
        """As `Driver`.

        A mapping that may only be read needs the read-only flag, which not every device has. With that flag a
        copy from the device into the memory fails: "invalid argument".
        """
        if not written and not self._cuda.cuMemHostRegister_v2(address, size, _PORTABLE | _READ_ONLY):
            return 0
        return int(self._cuda.cuMemHostRegister_v2(address, size, _PORTABLE))

    def unregister(self, address: int) -> int:
        """As `Driver`."""
        return int(self._cuda.cuMemHostUnregister(address))


def cuda_driver() -> CudaDriver | None:
    """Returns this machine's driver; None, logged, if it cannot be loaded: then copies are slower."""
    try:
        return CudaDriver()
    except (OSError, AttributeError) as error:
        log.warning("shared memory is not registered with CUDA, copies are slower: %s", error)
        return None


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


log = logging.getLogger(__name__)


class PinnedWeights:
    """Registers the segment that an end has mapped, and follows it when another takes its place.

    For the end's thread. Nothing happens before the first `pin` for a CUDA device.

    Args:
        end: a writer or a part, whose memory the device writes, or a reader, whose memory it reads.
        driver: finds what registers, at the first need; returns None where there is none.
    """

    def __init__(
        self,
        end: WeightsWriter | WeightsPart | WeightsReader,
        driver: Callable[[], Driver | None] = cuda_driver,
    ) -> None:
        self._end, self._find_driver = end, driver
        self._written = not isinstance(end, WeightsReader)
        self._memory: memoryview | None = None  # keeps the segment mapped as long as it is registered
        self._address = 0
        self._registered = False

    @cached_property
    def _driver(self) -> Driver | None:
        return self._find_driver()

    @property
    def bytes(self) -> int:
        """Registered bytes."""
        return self._memory.nbytes if self._memory is not None and self._registered else 0

    def pin(self, device: torch.device | str) -> None:
        """Registers the mapped segment, once, and lets go of one that it replaced; nothing for a CPU.

        Blocks: every page is locked, some 25 ms per GiB. No copy may be in flight. What cannot be registered
        is logged once and copied more slowly. Raises as the end's `memory`.
        """
        if torch.device(device).type != "cuda" or (memory := self._end.memory) is None:
            return
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if self._memory is not None and self._address == address:
            return  # the memory held is mapped, so no other segment has its address
        self._let_go()
        if self._driver is None:
            return
        self._memory, self._address = memory, address
        refused = self._driver.register(address, memory.nbytes, written=self._written)
        self._registered = not refused
        if refused:
            log.warning(
                "CUDA (error %d) does not register the %d bytes of the weights of bridge %s: copies are "
                "slower (ulimit -l, or the container's limit of locked memory?)",
                refused,
                memory.nbytes,
                self._end.bridge,
            )

    def close(self) -> None:
        """Lets go of the segment; call it before the end's `close`. No copy may be in flight. Idempotent."""
        self._let_go()

    def _let_go(self) -> None:
        if (
            self._registered
            and self._driver is not None
            and (refused := self._driver.unregister(self._address))
        ):
            log.warning(
                "CUDA (error %d) does not let go of the weights of bridge %s", refused, self._end.bridge
            )
        self._memory, self._registered = None, False
