"""A contender's processes, started once; rounds of it are timed in turn with rounds of the others, so that
all see the same neighbours.

Knows the contract and nothing of any contender. Every round checks that the bytes that were read are those
that were written.
"""

import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from shmbridge.bench import baselines, groups
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.child import serve
from shmbridge.bench.contract import MODULO, Plan, WriterProcess

START_TIMEOUT_S = 120.0
MOST_WARMING, WARMING_ROUNDS = 20_000, 8  # groups, and how many rounds it may take


@dataclass(frozen=True, slots=True)
class Round:
    """`count` groups through a contender."""

    count: int
    seconds: float
    producer_cpu_s: float
    consumer_cpu_s: float


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """This thread, and threads it starts, on one core until the end of the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Session:
    """A plan that is running; a context manager. For one thread."""

    def __init__(self, plan: Plan) -> None:
        if plan.producers > 1 and plan.contender in baselines.ONE_PRODUCER:
            raise ValueError(f"{plan.contender} takes one producer, not {plan.producers}")
        self.plan = plan
        self._open = ExitStack()
        self._sums = [_sum_of(plan, groups.SEED + n) for n in range(groups.SOURCES)]
        try:
            self._open.enter_context(pinned(plan.cores.consumer))
            contender = baselines.load(plan.contender)
            self._reader = contender.Reader(plan)
            self._open.callback(self._reader.close)
            start = getattr(contender, "start", _Child)
            self._writers: list[WriterProcess] = []
            for number in range(plan.producers):
                self._writers.append(start(plan, self._reader.address, number))
                self._open.callback(self._writers[-1].close)
            for writer in self._writers:
                writer.ready()
        except BaseException:
            self.close()
            raise

    def round(self, count: int, *, filled_first: bool = False) -> Round:
        """Moves `count` groups, rounded up to the same number for each producer, and times their reading.

        With `filled_first` all are written before the first is read; they must fit.
        """
        each = -(-count // self.plan.producers)
        count = each * self.plan.producers
        with pinned(self.plan.cores.consumer):
            began, cpu = time.perf_counter(), time.process_time()
            for writer in self._writers:
                writer.begin(each)
            if filled_first:
                spent = [writer.end() for writer in self._writers]
                began, cpu = time.perf_counter(), time.process_time()
            total = self._reader.read(count)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        if not filled_first:
            spent = [writer.end() for writer in self._writers]
        self._check(total, each)
        return Round(count, seconds, sum(spent), cpu)

    def warm(self, seconds: float = 0.5) -> int:
        """Fills the memory in flight twice, untimed, and returns how many groups take about `seconds`."""
        count, took = self.plan.producers, 0.0
        left = min(2 * self.plan.in_flight * self.plan.producers, MOST_WARMING)
        while left > 0 and took < WARMING_ROUNDS * seconds:
            done = self.round(min(count, max(left, self.plan.producers)))
            left, took, count = left - done.count, took + done.seconds, 4 * count
        done = self.round(max(self.plan.producers, int(0.2 * seconds * done.count / done.seconds)))
        return max(self.plan.producers, int(seconds * done.count / done.seconds))

    def close(self) -> None:
        """Ends the processes and gives the memory back. Idempotent."""
        self._open.close()

    def _check(self, total: int, each: int) -> None:
        whole, rest = divmod(each, len(self._sums))
        wanted = self.plan.producers * (whole * sum(self._sums) + sum(self._sums[:rest])) % MODULO
        if self.plan.look == "every byte" and total != wanted:
            raise AssertionError(
                f"{self.plan.contender}: what was read is not what was written (sum {total:#x}, not "
                f"{wanted:#x})"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def limit_of(plan: Plan) -> Plan:
    """The plan of the limit that this one is held against: one producer, the same bytes, the same lane."""
    return replace(
        plan,
        contender=baselines.LIMIT,
        producers=1,
        take="get",
        look="every byte",
        checksum="none",
        stores="plain",
        reads=1,
    )


def _sum_of(plan: Plan, seed: int) -> int:
    return (
        sum(touch(column) for column in groups.flat_columns(groups.make(plan.shape, "arrays", seed))) % MODULO
    )


class _Child:
    """A producer in a process of its own."""

    def __init__(self, plan: Plan, address: Any, number: int) -> None:
        context = mp.get_context("spawn")
        self._here, there = context.Pipe()
        self._child = context.Process(target=serve, args=(plan, address, number, there), daemon=True)
        self._child.start()
        there.close()

    def ready(self) -> None:
        self._answer()

    def begin(self, count: int) -> None:
        self._here.send(count)

    def end(self) -> float:
        self.begin(0)
        return self._answer()

    def close(self) -> None:
        self._here.close()
        self._child.join(START_TIMEOUT_S)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()

    def _answer(self) -> float:
        answered = self._here.poll(START_TIMEOUT_S)
        try:
            if answered:
                return float(self._here.recv())
        except (EOFError, ConnectionResetError):
            self._child.join(START_TIMEOUT_S)
        raise RuntimeError(
            f"a producer's process {'ended' if answered else 'says nothing'} (pid {self._child.pid}, "
            f"{self._child.exitcode})"
        )
