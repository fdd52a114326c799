"""Host to device: straight from a registered ring, from a pinned buffer, from pageable memory; and whether
copies hide behind compute.

    pytest bench/test_bench_device.py -s

Skipped where there is no CUDA device. The same bytes each time: 64 MiB of tokens in records of 2 MiB.
Bandwidth is by CUDA events around the copies alone; overlap is the share of the time of host-to-device
copies, in a trace of torch's profiler, in which a kernel ran. Knows public names and torch only.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import shmbridge

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device: copies from the ring are not measured here", allow_module_level=True)

from shmbridge.consumers.device_batch import DeviceCopies  # noqa: E402

RECORDS, TOKENS = 32, 1 << 19
BYTES = RECORDS * TOKENS * 4
ROUNDS = 20
QUEUED_CYCLES = 20_000_000  # of the GPU, some 10 ms


@pytest.fixture(scope="module")
def filled() -> Iterator[tuple[shmbridge.Consumer, DeviceCopies]]:
    bridge = f"bench-device-{os.getpid()}"
    with (
        shmbridge.Consumer(bridge) as consumer,
        shmbridge.Producer(bridge, lane_bytes="256M") as producer,
        DeviceCopies("cuda") as copies,
    ):
        for number in range(RECORDS):
            producer.put({"tokens": [np.full(TOKENS, number, np.int32)]})
        yield consumer, copies
    shmbridge.clean(bridge, dry_run=False)


@pytest.fixture(scope="module")
def groups(filled):
    consumer, _ = filled
    taken = consumer.take_groups(groups=RECORDS, timeout_s=30.0)
    assert taken is not None
    yield taken
    for group in taken:
        for record in group.records:
            record.release()


def gib_per_s(copy: Callable[[], object], stream) -> float:
    """The median of some rounds, by events on the stream that copies.

    The stream sleeps at first, until all copies are queued: the host's part, which a learner's prefetch
    thread does during a step, is not in the figure.
    """
    found = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(QUEUED_CYCLES)
        begin.record(stream)
        kept = copy()
        end.record(stream)
        end.synchronize()
        found.append(BYTES / 2**30 / (begin.elapsed_time(end) / 1000))
        del kept
    return float(np.median(found))


def test_bandwidth(filled, groups, benchmark):
    _, copies = filled
    on_device = torch.empty(BYTES // 4, dtype=torch.int32, device="cuda")
    pageable = torch.zeros(BYTES // 4, dtype=torch.int32)
    pinned = pageable.pin_memory()
    main = torch.cuda.current_stream()
    copies.batch(groups)  # registers the lane, untimed
    found = {
        "straight from the ring": gib_per_s(lambda: copies.batch(groups), copies.stream),
        "from a pinned buffer": gib_per_s(lambda: on_device.copy_(pinned, non_blocking=True), main),
        "from pageable memory": gib_per_s(lambda: on_device.copy_(pageable, non_blocking=True), main),
    }
    np.testing.assert_array_equal(copies.batch(groups).tokens.cpu()[::TOKENS], np.arange(RECORDS))
    benchmark.group = "host to device"
    benchmark.extra_info.update(
        label="straight from the ring", gib_per_s=found, registered_bytes=copies.lanes.bytes
    )
    benchmark.pedantic(lambda: copies.batch(groups)._end_copies(), rounds=ROUNDS)
    print(
        json.dumps(
            found | {"of pinned": found["straight from the ring"] / found["from a pinned buffer"]}, indent=2
        )
    )


def test_overlap_with_compute(filled, groups, tmp_path):
    _, copies = filled
    work = torch.randn(4096, 4096, device="cuda")
    copies.batch(groups)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            for _ in range(20):
                work = torch.tanh(work @ work)
            ahead = copies.batch(groups)  # as the prefetch thread does while a step computes
            ahead._end_copies()
        torch.cuda.synchronize()
    trace = Path(os.environ.get("SHMBRIDGE_TRACE", tmp_path / "overlap.json"))
    profile.export_chrome_trace(str(trace))
    print(
        f"{overlapped(json.loads(trace.read_text())['traceEvents']):.0%} of the copies' time is hidden; "
        f"trace: {trace}"
    )


def overlapped(events: list[dict]) -> float:
    """The share of the time of host-to-device copies in which a kernel ran."""

    def spans(wanted: Callable[[dict], bool]) -> list[tuple[float, float]]:
        return sorted(
            (each["ts"], each["ts"] + each["dur"]) for each in events if "dur" in each and wanted(each)
        )

    copies = spans(lambda each: each.get("cat") == "gpu_memcpy" and "HtoD" in each["name"])
    kernels = spans(lambda each: each.get("cat") == "kernel")
    hidden = sum(
        max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in kernels
    )
    return hidden / sum(end - start for start, end in copies)
