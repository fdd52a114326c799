"""What watching costs a run: its throughput, and the CPU time of its two ends, with `shmbridge top` and with
`shmbridge record` beside it, and with neither; and with a `record` that takes CPU time as any process does,
for comparison.

One environment that puts groups of lists as fast as it can, one trainer that reads every byte in place, in
windows of some seconds, in turn within each round: nobody watches, `top` looks once a second, `record` copies
what it can into files. Each end has a core; a watcher shares the trainer's, which is the less busy one.
Method: bench/README.md.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from shmbridge.bench.flow import Flow, cores, end
from shmbridge.bench.groups import ROWS

LENGTH = 2048
WATCHERS = ("top", "record", "record, not idle")
TAKES_ITS_SHARE = """
import sys
from shmbridge.watch import observer
observer.give_way = lambda: None
from shmbridge.cli import main
sys.exit(main())
"""
START_S = 3.0  # until a watcher has imported what it needs, at most; its import is not the run's cost


@contextlib.contextmanager
def watcher(beside: str, bridge: str, folder: Path) -> Iterator[None]:
    """Runs one of WATCHERS beside the block; nothing for "nobody"."""
    if beside == "nobody":
        yield
        return
    command, _, not_idle = beside.partition(", ")
    flags = {"top": ["--json", "--interval", "1s"], "record": ["--out", str(folder)]}[command]
    program = ["-c", TAKES_ITS_SHARE] if not_idle else ["-m", "shmbridge.cli"]
    process = subprocess.Popen(
        [sys.executable, *program, command, bridge, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.sched_setaffinity(process.pid, {cores()["trainer"]})
    time.sleep(START_S)
    assert process.poll() is None, f"{beside} has ended"
    try:
        yield
    finally:
        end(process)


def ends_cpu(window: dict[str, Any]) -> float:
    spent: dict[str, float] = window["cpu_s_per_million_tokens"]
    return spent["environment"] + spent["trainer"]


@pytest.mark.timeout(900)
@pytest.mark.benchmark(group="watching")
def test_cost_of_watching(benchmark: Any, per_operation: Any, quick: bool, tmp_path: Path) -> None:
    windows: dict[str, list[dict[str, Any]]] = {beside: [] for beside in ("nobody", *WATCHERS)}

    def measure() -> None:
        with Flow("put", LENGTH, window=64) as flow:
            groups = flow.warm(500, 1.0 if quick else 3.0)
            for number in range(3 if quick else 9):
                for beside, found in windows.items():
                    with watcher(beside, flow.bridge, tmp_path / f"{beside}-{number}"):
                        found.append(flow.go(groups=groups))

    benchmark.pedantic(measure, rounds=1)
    per_operation([each["seconds"] / each["groups"] for each in windows["record"]], tokens=ROWS * LENGTH)
    rate = {beside: median(each["tokens_per_s"] for each in found) for beside, found in windows.items()}
    cpu = {beside: median(map(ends_cpu, found)) for beside, found in windows.items()}
    for beside in WATCHERS:
        benchmark.extra_info[beside] = {
            "throughput_ratio": rate[beside] / rate["nobody"],
            "cpu_ratio": cpu[beside] / cpu["nobody"],
        }
        print(
            f"\n{beside} beside a run: {rate[beside] / rate['nobody']:.3f} of its throughput, "
            f"{cpu[beside] / cpu['nobody']:.3f} of the CPU time of its ends"
        )
