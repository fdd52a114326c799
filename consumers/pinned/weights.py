"""The weights segment registered with CUDA, at one of its ends: copies between the model and the segment then
run at the speed of pinned memory, which is several times that of pageable memory.

Used by what publishes a model's weights from a GPU, and by what loads them into one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from shmbridge.consumers.pinned.driver import Driver, cuda_driver
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

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
