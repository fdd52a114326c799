"""A ring as one writes it in an afternoon: slots in shared memory, head and tail as NumPy words, columns
copied in by NumPy.

Does: move groups of one size between one producer and one consumer, read in place. Does not: order its stores
(right on x86 by luck, wrong on Arm), wait without burning a core, survive a death (a killed side leaves the
other spinning, without an error), take groups of other sizes or a second producer.
"""

import mmap
import os
from time import monotonic

import numpy as np

from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import DTYPES, Array, Group, flat_columns

NAME = "NumPy slots"
NEEDS = ()
INSTALL = ""

_LINE = 64  # bytes; head and tail have one each, and columns begin on one


class _Slots:
    """Both sides' view: columns of each slot, and the two counters."""

    def __init__(self, fd: int, plan: Plan) -> None:
        sizes = [np.dtype(DTYPES[name]).itemsize * plan.shape.tokens for name in plan.shape.columns] + [
            8 * plan.shape.rows
        ]
        starts = np.cumsum([0, *(-(-size // _LINE) * _LINE for size in sizes)])
        self.count, stride = plan.in_flight, int(starts[-1])
        size = 2 * _LINE + self.count * stride
        os.ftruncate(fd, size)
        self._segment = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        words = np.frombuffer(self._segment, np.uint64, 2 * _LINE // 8)
        self.tail, self.head = words[:1], words[_LINE // 8 :][:1]
        data = np.frombuffer(self._segment, np.uint8, offset=2 * _LINE)
        self.columns = [
            [data[slot * stride + int(start) :][:size] for start, size in zip(starts, sizes, strict=False)]
            for slot in range(self.count)
        ]


class Reader(contract.Reader):
    """Spins, yielding its core between looks."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._fd = os.memfd_create("numpy-slots")
        self._slots, self._position = _Slots(self._fd, plan), 0
        self.address = f"/proc/{os.getpid()}/fd/{self._fd}"

    def read_one(self) -> int:
        slots = self._slots
        if slots.tail[0] == self._position:
            _spin(lambda: slots.tail[0] != self._position)
        for _ in range(self.plan.reads):
            total = sum(map(touch, slots.columns[self._position % slots.count]))
        self._position += 1
        slots.head[0] = self._position
        return total

    def close(self) -> None:
        del self._slots
        os.close(self._fd)


class Writer(contract.Writer):
    """Copies column by column."""

    def __init__(self, address: str, plan: Plan) -> None:
        super().__init__(address, plan)
        fd = os.open(address, os.O_RDWR)
        self._slots, self._position = _Slots(fd, plan), 0
        os.close(fd)

    def prepare(self, groups: list[Group]) -> list[list[Array]]:
        return [[column.view(np.uint8) for column in flat_columns(group)] for group in groups]

    def write_one(self, group: list[Array]) -> None:
        slots = self._slots
        if self._position - int(slots.head[0]) == slots.count:
            _spin(lambda: self._position - int(slots.head[0]) < slots.count)
        for room, column in zip(slots.columns[self._position % slots.count], group, strict=False):
            np.copyto(room, column)
        self._position += 1
        slots.tail[0] = self._position


def _spin(until: "contract.Condition") -> None:
    deadline = monotonic() + READ_TIMEOUT_S
    while not until():
        os.sched_yield()
        if monotonic() > deadline:
            raise TimeoutError("the other side stands still")
