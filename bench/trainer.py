"""The trainer's process of an end-to-end run: takes groups, over HTTP or from a bridge, and measures windows
of them.

    python -m shmbridge.bench.trainer '{"length": 2048, "bridge": "run1"}' or with "url":
    "http://127.0.0.1:8000"

Each line on stdin asks for one window, `{"groups": 100}` or `{"seconds": 5}` with the `pids` whose CPU time
counts; the answer is one line of JSON. Arriving groups are compared with the sent ones, bit for bit; over
HTTP only the first groups are. Started by shmbridge.bench.flow; knows nothing of the sender.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import shmbridge
from shmbridge.bench.atropos_http import COLUMNS, UNDER_WAY, group_of
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import MODULO
from shmbridge.bench.groups import ROWS, SOURCES, Array

RUN = shmbridge.Run(batch_size=ROWS, max_token_len=1 << 20, num_steps=1 << 30)
# Upstream's example trainer sleeps a whole second when it finds nothing; this is in HTTP's favour where
# latency is the question.
IDLE_S = 0.02
_TIMEOUT_S = 10  # upstream's own, for one batch
_PATIENCE_S = 60.0  # for the next group: after that a process must be dead


class Differs(ValueError):
    """A group arrived that was not sent."""


class Groups:
    """The groups of one length as they come, whatever way, and counts of them."""

    def __init__(self, length: int) -> None:
        self.counts = {"tokens": 0, "polls": 0, "empty_polls": 0}
        sent = (group_of(length, "arrays", number) for number in range(SOURCES))
        self._sums = {sum(touch(group[name][0]) for name in COLUMNS) % MODULO for group in sent}

    def over_http(self, url: str) -> Iterator[float]:
        """Batches as upstream's example trainer fetches them: a `requests.get` each, gzip accepted, JSON to
        Python lists.

        Its later conversion of the lists to arrays and tensors is left out, while the other side ends in
        arrays.
        """
        import requests

        requests.post(
            f"{url}/register", json=msgspec.structs.asdict(RUN), timeout=_TIMEOUT_S
        ).raise_for_status()
        unchecked = UNDER_WAY  # those of the warm-up
        last = time.monotonic()
        while True:
            batch = requests.get(f"{url}/batch", timeout=_TIMEOUT_S).json()["batch"]
            self.counts["polls"] += 1
            if batch is None:
                if time.monotonic() - last > _PATIENCE_S:
                    raise TimeoutError(
                        f"nothing has come over HTTP for {_PATIENCE_S} s; {self.counts} so far"
                    )
                self.counts["empty_polls"] += 1
                time.sleep(IDLE_S)
                continue
            for group in batch:
                self.counts["tokens"] += sum(map(len, group["tokens"]))
                if unchecked:
                    unchecked -= 1
                    self._check(sum(map(touch, as_arrays(group))))
                yield group["scores"][0]
            last = time.monotonic()

    def from_bridge(self, bridge: str) -> Iterator[float]:
        """Records in place, every byte of their per-token columns read."""
        with shmbridge.Consumer(bridge, run=RUN) as consumer:
            while True:
                with consumer.get(_PATIENCE_S) as record:
                    total = 0
                    for name in COLUMNS:
                        total += touch(record[name].values)
                    self._check(total)
                    self.counts["tokens"] += record.token_count
                    handed_over = float(record["score"][0])
                yield handed_over

    def _check(self, total: int) -> None:
        if total % MODULO not in self._sums:
            raise Differs(f"a group of sum {total % MODULO:#x} was not sent; {self.counts} so far")


def as_arrays(group: dict[str, Any]) -> list[Array]:
    """A group of JSON in the columns and types that a lane has."""
    return [
        np.array(group["tokens"], np.int32).ravel(),
        (np.array(group["masks"]) != -100).astype(np.uint8).ravel(),
        np.array(group["inference_logprobs"], np.float32).ravel(),
        np.array(group["advantages"], np.float32).ravel(),
    ]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process with all its threads, also those that have ended, and of its children."""
    children = [
        child for each in Path(f"/proc/{pid}/task").glob("*/children") for child in each.read_text().split()
    ]
    own = time.clock_gettime((~pid << 3) | 2)  # the clock of that process, as clock_getcpuclockid(3) makes it
    return own + sum(cpu_s(int(child)) for child in children)


def window(
    arrivals: Iterator[float], counts: dict[str, int], asked: dict[str, Any], credits_fd: int
) -> dict[str, Any]:
    """Takes groups until enough have come, from now to the last of them."""
    pids = {**asked.get("pids", {}), "trainer": os.getpid()}
    most, seconds = asked.get("groups", 1 << 62), asked.get("seconds", float("inf"))
    before = dict(counts)
    cpu = {who: cpu_s(pid) for who, pid in pids.items()}
    latencies: list[float] = []
    began = now = time.monotonic()
    while len(latencies) < most and now - began < seconds:
        handed_over = next(arrivals)
        now = time.monotonic()
        latencies.append(now - handed_over)
        if credits_fd >= 0:
            with contextlib.suppress(BrokenPipeError):  # the environment has ended, what it sent still comes
                os.write(credits_fd, b".")
    cpu = {who: cpu_s(pid) - cpu[who] for who, pid in pids.items()}
    return {
        "groups": len(latencies),
        "seconds": now - began,
        "cpu_s": cpu,
        "latency_ms": {
            name: 1e3 * float(np.percentile(latencies, rank)) for name, rank in (("p50", 50), ("p99", 99))
        },
        **{name: counts[name] - before[name] for name in counts},
    }


def main() -> None:
    order = json.loads(sys.argv[1])
    groups = Groups(order["length"])
    arrivals = groups.from_bridge(order["bridge"]) if "bridge" in order else groups.over_http(order["url"])
    for line in sys.stdin:
        print(json.dumps(window(arrivals, groups.counts, json.loads(line), order["credits_fd"])), flush=True)


if __name__ == "__main__":
    main()
