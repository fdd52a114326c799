"""multiprocessing.Queue: what Python has at hand.

Does: move any object that can be pickled, any number of producers and consumers, a bound on the number of
objects. Does not: read in place (a thread of the producer pickles into a pipe of 64 KiB, the consumer copies
out of it and unpickles), survive a death (a killed reader leaves its lock taken, a killed writer half an
object in the pipe; both for ever), bound the memory.
"""

import multiprocessing as mp
from typing import Any

from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import Array

NAME = "multiprocessing.Queue"
NEEDS = ()
INSTALL = ""


class Reader(contract.Reader):
    """A queue of as many groups as the lane would hold."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.address: Any = mp.get_context("spawn").Queue(plan.in_flight)

    def read_one(self) -> int:
        return sum(map(touch, self.address.get(timeout=READ_TIMEOUT_S)))

    def close(self) -> None:
        _close(self.address)


class Writer(contract.Writer):
    """Puts lists of arrays."""

    def __init__(self, address: Any, plan: Plan) -> None:
        super().__init__(address, plan)
        self._queue = address

    def write_one(self, group: list[Array]) -> None:
        self._queue.put(group, timeout=READ_TIMEOUT_S)

    def close(self) -> None:
        _close(self._queue)


def _close(queue: Any) -> None:
    queue.close()
    queue.join_thread()
