"""The limit: a C twin.

Two processes, the same lane size, one memcpy in, a flag, one read of every byte, the flag back.

Does: move the bytes of one record size, in slots of exactly that size, between one writer and one reader,
each spinning on its core. Does not: know where a record begins, wait without burning a core, survive
anybody's death, check anything, take more than one producer.
"""

import mmap
import os
from typing import Any

from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import MemcpyBaseline, segment_bytes
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import Group, flat_columns

NAME = "limit (C twin)"
NEEDS = ()
INSTALL = ""


class Reader(contract.Reader):
    """An unnamed segment, which the writer opens through /proc."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        size = segment_bytes(plan.lane_bytes, plan.shape.bytes)
        self._fd = os.memfd_create("shmbridge-bench")
        os.ftruncate(self._fd, size)
        self._segment, self._side = _side(self._fd, plan)
        self.address = f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self, count: int) -> int:
        return self._side.read(count, READ_TIMEOUT_S)

    def close(self) -> None:
        self._side.close()
        self._segment.close()
        os.close(self._fd)


class Writer(contract.Writer):
    """Copies records that lie one behind the other."""

    def __init__(self, address: str, plan: Plan) -> None:
        super().__init__(address, plan)
        fd = os.open(address, os.O_RDWR)
        self._segment, self._side = _side(fd, plan)
        os.close(fd)

    def prepare(self, groups: list[Group]) -> list[Any]:
        return [b"".join(column.tobytes() for group in groups for column in flat_columns(group))]

    def write(self, groups: list[Any], count: int) -> None:
        self._side.write(groups[0], count, READ_TIMEOUT_S)


def _side(fd: int, plan: Plan) -> tuple[mmap.mmap, MemcpyBaseline]:
    size = segment_bytes(plan.lane_bytes, plan.shape.bytes)
    segment = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return segment, MemcpyBaseline(
        segment, plan.lane_bytes, plan.shape.bytes, plan.stores == "past the cache"
    )
