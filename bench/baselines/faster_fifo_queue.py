"""faster-fifo: a byte ring in shared memory under one process-shared mutex.

Does: any number of producers and consumers, groups of any size, a bound in bytes, waiting without burning a
core. Does not: read in place (the consumer copies each message into a buffer of its own), survive a death
(the mutex is not robust: a process killed inside leaves all others waiting for ever), keep columns apart. By
default it pickles; here both ends use plain bytes, which is faster: one join of the columns on the way in,
one memoryview on the way out.
"""

from typing import Any

from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import Array

NAME = "faster-fifo"
NEEDS = ("faster_fifo",)
INSTALL = "pip install faster-fifo"


def _join(columns: list[Array]) -> bytes:
    return b"".join(column.data for column in columns)


def _as_it_is(message: memoryview) -> memoryview:
    return message


class Reader(contract.Reader):
    """A ring as large as the lane."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        import faster_fifo
        import faster_fifo_reduction  # noqa: F401  lets multiprocessing hand the queue on

        self.address: Any = faster_fifo.Queue(plan.lane_bytes, loads=_as_it_is, dumps=_join)

    def read_one(self) -> int:
        return touch(self.address.get(timeout=READ_TIMEOUT_S))

    def close(self) -> None:
        self.address.close()


class Writer(contract.Writer):
    """Joins the columns and puts them."""

    def __init__(self, address: Any, plan: Plan) -> None:
        super().__init__(address, plan)
        self._queue = address

    def write_one(self, group: list[Array]) -> None:
        self._queue.put(group, timeout=READ_TIMEOUT_S)
