"""How often a byte of values passes between processor and memory on its way: counted by cachegrind in a cache
smaller than a group.

    python -m shmbridge.bench.passes

Needs valgrind, takes two or three minutes. The simulated cache has 1 MiB, a group 2.2 MB, so that a second
look at all of it comes from memory again. Every case runs for few and for more groups; the difference is
theirs alone. Made the table in test_bench_scaling.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import shmbridge
from shmbridge.bench.groups import LARGE, Form
from shmbridge.bench.scaling import OneThread

CASES: dict[str, Form] = {
    "put from arrays": "arrays",
    "put from lists": "lists",
    "take": "arrays",
    "packed": "arrays",
    "padded": "arrays",
    "to a device": "arrays",
}
FEW, MORE = 4, 12
LINE = 64
CACHEGRIND = [
    "valgrind",
    "--tool=cachegrind",
    "--cachegrind-out-file=/dev/null",
    "--cache-sim=yes",
    f"--D1=32768,8,{LINE}",
    f"--LL=1048576,16,{LINE}",
]


def run(case: str, groups: int) -> None:
    """Runs a number of groups of one case, after the setup that every case needs."""
    with OneThread(LARGE, CASES[case]) as lane:
        lane.turn(FEW)
        lane.put(groups if case.startswith("put") else MORE)
        if case == "take":
            lane.take(groups)
        elif case == "to a device":
            # which is the CPU here: what is left on one with a device is the read that its DMA makes
            from shmbridge.consumers.device_batch import DeviceCopies

            with DeviceCopies("cpu", tuple(LARGE.columns)) as copies:
                for _ in range(groups // FEW):
                    next(lane.consumer.batches(groups=FEW, prefetch=0, make=copies.batch)).release()
        elif case in ("packed", "padded"):
            for _ in range(groups // FEW):
                lane.gather(FEW, "packed" if case == "packed" else "padded")


def begin(case: str, groups: int) -> "subprocess.Popen[str]":
    path = {"PYTHONPATH": str(Path(shmbridge.__file__).parents[1]), "PYTHONHASHSEED": "0"}
    argv = [*CACHEGRIND, sys.executable, "-m", "shmbridge.bench.passes", case, str(groups)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=os.environ | path)


def lines(process: "subprocess.Popen[str]") -> tuple[int, int]:
    """Lines of the cache that were read from memory, and taken to be written."""
    _, said = process.communicate()
    found = re.search(r"LLd misses:.*\(\s*([\d,]+) rd\s*\+\s*([\d,]+) wr", said)
    if process.returncode or not found:
        raise RuntimeError(f"cachegrind: {said[-2000:]}")
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def main() -> None:
    print(f"{'passes per byte of values':28}{'read':>8}{'written':>10}")
    for case in CASES:
        few, more = (begin(case, groups) for groups in (FEW, MORE))
        read, written = (
            LINE * (b - a) / (MORE - FEW) / LARGE.bytes for a, b in zip(lines(few), lines(more), strict=True)
        )
        print(f"{case:28}{read:8.2f}{written:10.2f}", flush=True)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else main()
