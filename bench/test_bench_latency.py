"""From `put` to the return of `get`, beside an eventfd's wake in the same run: asleep, live, among idle
producers, from asyncio.

`pytest bench/test_bench_latency.py`, about 40 s. Samples are lists in `extra_info["samples_us"]`. Method:
bench/README.md.
"""

import asyncio
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import shmbridge

CORES = sorted(os.sched_getaffinity(0))  # the first wakes, the last waits
WAKES = 300  # of each kind
GAP_NS = 12_000_000  # between two wakes of one run; the woken process must have slept at least
ASLEEP_NS = 10_000_000
LIVE = 20_000
LIVE_GAP_NS = 20_000
GROUP = {"tokens": [np.arange(16, dtype=np.int32)]}


# -- the process that wakes
# -------------------------------------------------------------------------------------------------------


def wake(bridge: str, event: int, clock: int, wakes: int, gap_ns: int, busy: bool) -> None:
    """Writes the time to `clock`, then puts, or writes to the eventfd, in turn; between them it sleeps, or
    spins if it is `busy`.
    """
    os.sched_setaffinity(0, {CORES[0]})
    said = np.frombuffer(mmap.mmap(clock, 16 * wakes), np.int64)
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for _ in range(64):  # one-time work does not belong to a wake
            producer.put(GROUP)
        print("ready", flush=True)
        sys.stdin.readline()
        for n in range(2 * wakes):
            until = time.monotonic_ns() + gap_ns
            if not busy:
                time.sleep(gap_ns / 1e9)
            while time.monotonic_ns() < until:
                pass
            if n % 2 == 0:
                said[n] = time.monotonic_ns()
                producer.put(GROUP)
            elif event >= 0:
                said[n] = time.monotonic_ns()
                os.eventfd_write(event, 1)
        sys.stdin.readline()


@contextmanager
def waker(
    bridge: str, wakes: int, gap_ns: int, event: int = -1, busy: bool = True
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The waking process, ready to begin at a line on its stdin, and the times it says."""
    clock = os.memfd_create("clock")
    os.ftruncate(clock, 16 * wakes)
    argv = [sys.executable, __file__, json.dumps([bridge, event, clock, wakes, gap_ns, busy])]
    fds = [clock, *([event] if event >= 0 else [])]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child, np.frombuffer(mmap.mmap(clock, 16 * wakes), np.int64)
        child.communicate("end\n", timeout=10)
    finally:
        child.kill()
        child.wait()
        os.close(clock)


def begin(child: "subprocess.Popen[str]") -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


# -- the process that is woken, which is this one
# ---------------------------------------------------------------------------------


@contextmanager
def consumer_of(bridge: str) -> Iterator[shmbridge.Consumer]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[-1]})
    try:
        with shmbridge.Consumer(bridge) as consumer:
            yield consumer
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def idle_producers(bridge: str, count: int) -> Iterator[None]:
    """Another process with `count` producers that do nothing."""
    code = (
        "import sys, shmbridge\n"
        f"producers = [shmbridge.Producer({bridge!r}, lane_bytes='64K') for _ in range({count})]\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield
        child.communicate("end\n", timeout=10)
    finally:
        child.kill()
        child.wait()


def woken(bridge: str, producers: int, busy: bool) -> tuple[dict[str, list[float]], float]:
    """Microseconds of our wakes, from `put` and from its commit, and of the eventfd's, taken in turn; and the
    share of a core used.
    """
    event = os.eventfd(0)
    with (
        consumer_of(bridge) as consumer,
        idle_producers(bridge, producers),
        waker(bridge, WAKES, GAP_NS, event, busy) as (child, said),
    ):
        for _ in range(64):
            consumer.get(10).release()
        asleep, back, committed = (np.zeros(2 * WAKES, np.int64) for _ in range(3))
        begin(child)
        cpu, began = time.process_time(), time.monotonic()
        for n in range(0, 2 * WAKES, 2):
            asleep[n] = time.monotonic_ns()
            record = consumer.get(10)
            back[n] = time.monotonic_ns()
            committed[n] = record.meta.t_publish_ns
            record.release()
            asleep[n + 1] = time.monotonic_ns()
            os.eventfd_read(event)
            back[n + 1] = time.monotonic_ns()
        cpu = (time.process_time() - cpu) / (time.monotonic() - began)
        ours, theirs = split(asleep, said, back)
        wakes, _ = split(asleep, np.where(committed, committed, said), back)
    os.close(event)
    return {"put to get": ours, "commit to get": wakes, "eventfd": theirs}, cpu


async def woken_in_a_loop(
    bridge: str, take: Callable[[shmbridge.Consumer], Callable[[], Awaitable[Any]]]
) -> tuple[list[float], list[float]]:
    """The same from asyncio; the eventfd is a reader of the loop."""
    loop, event = asyncio.get_running_loop(), os.eventfd(0, os.EFD_NONBLOCK)
    future: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        os.eventfd_read(event)
        future.set_result(None)

    loop.add_reader(event, readable)
    with consumer_of(bridge) as consumer, waker(bridge, WAKES, GAP_NS, event) as (child, said):
        for _ in range(64):
            consumer.get(10).release()
        asleep, back = np.zeros(2 * WAKES, np.int64), np.zeros(2 * WAKES, np.int64)
        begin(child)
        following = take(consumer)
        for n in range(0, 2 * WAKES, 2):
            asleep[n] = time.monotonic_ns()
            record = await following()
            back[n] = time.monotonic_ns()
            record.release()
            future = loop.create_future()
            asleep[n + 1] = time.monotonic_ns()
            await future
            back[n + 1] = time.monotonic_ns()
        ours, theirs = split(asleep, said, back)
    loop.remove_reader(event)
    os.close(event)
    return ours, theirs


def split(asleep: Any, said: Any, back: Any) -> tuple[list[float], list[float]]:
    """Ours and the eventfd's, of those wakes that found the waiter asleep for long enough."""
    valid = said - asleep >= ASLEEP_NS
    took = (back - said) / 1e3
    assert valid.mean() > 0.8, (
        f"only {valid.mean():.0%} of the waiters had slept {ASLEEP_NS / 1e6} ms: the machine is too busy"
    )
    return [took[kind::2][valid[kind::2]].round(2).tolist() for kind in (0, 1)]  # type: ignore[return-value]


def live(bridge: str) -> list[float]:
    """Microseconds to a consumer that is in `get` already and has not gone to sleep yet."""
    with consumer_of(bridge) as consumer, waker(bridge, LIVE, LIVE_GAP_NS // 2) as (child, said):
        for _ in range(64):
            consumer.get(10).release()
        back = np.zeros(LIVE, np.int64)
        begin(child)
        for n in range(LIVE):
            with consumer.get(10):
                back[n] = time.monotonic_ns()
        return ((back - said[::2]) / 1e3)[LIVE // 10 :].round(2).tolist()  # type: ignore[no-any-return]


# -- the figures
# -----------------------------------------------------------------------------------------------------------


def report(
    benchmark: Any, per_operation: Any, label: str, run: Callable[[], dict[str, list[float]]]
) -> dict[str, list[float]]:
    benchmark.group = "latency"
    samples = benchmark.pedantic(run, rounds=1)
    per_operation([each / 1e6 for each in next(iter(samples.values()))])  # ours stand first
    benchmark.extra_info.update(label=label, samples_us=samples)
    for name, values in samples.items():
        for share in (50, 90, 99):
            benchmark.extra_info[f"{name}_p{share}_us"] = round(float(np.percentile(values, share)), 2)
    shown = {
        name: [round(float(np.percentile(values, share)), 1) for share in (50, 90, 99)]
        for name, values in samples.items()
    }
    print(shown)
    return samples


@pytest.fixture
def bridge() -> Iterator[str]:
    name = f"bench-latency-{os.getpid()}"
    yield name
    shmbridge.clean(name, dry_run=False)


@pytest.mark.parametrize(("waker", "idle"), [("busy", 0), ("asleep", 0), ("busy", 16)])
def test_asleep(benchmark: Any, per_operation: Any, bridge: str, waker: str, idle: int) -> None:
    def run() -> dict[str, list[float]]:
        samples, cpu = woken(bridge, idle, waker == "busy")
        benchmark.extra_info["consumer_cpu_share"] = round(cpu, 5)
        return samples

    among = f", {idle} idle producers" if idle else ""
    report(benchmark, per_operation, f"consumer asleep, producer {waker}{among}", run)


@pytest.mark.parametrize("how", ["get_async", "async_for"])
def test_asleep_in_a_loop(benchmark: Any, per_operation: Any, bridge: str, how: str) -> None:
    def take(consumer: shmbridge.Consumer) -> Callable[[], Awaitable[Any]]:
        if how == "get_async":
            return lambda: consumer.get_async(10)
        records = consumer.__aiter__()
        return lambda: anext(records)

    def run() -> dict[str, list[float]]:
        ours, theirs = asyncio.run(woken_in_a_loop(bridge, take))
        return {how: ours, "eventfd": theirs}

    report(benchmark, per_operation, f"event loop asleep, {how}", run)


def test_live(benchmark: Any, per_operation: Any, bridge: str) -> None:
    report(benchmark, per_operation, "consumer awake", lambda: {"get": live(bridge)})


@pytest.mark.benchmark(group="idle")
@pytest.mark.parametrize("idle", [1, 16])
def test_idle(benchmark: Any, per_operation: Any, bridge: str, idle: int) -> None:
    """The cost of a consumer that waits for producers that put nothing."""

    def run() -> float:
        with consumer_of(bridge) as consumer, idle_producers(bridge, idle):
            consumer.poll()
            cpu, began = time.process_time(), time.monotonic()
            with pytest.raises(shmbridge.ConsumerEmpty):
                consumer.get(5)
            return (time.process_time() - cpu) / (time.monotonic() - began)

    share = benchmark.pedantic(run, rounds=1)
    per_operation([share])  # CPU time of one second
    benchmark.extra_info.update({"label": f"{idle} idle producers", "share_of_a_core": share})


if __name__ == "__main__":
    wake(*json.loads(sys.argv[1]))
