"""The C twin: compiled once into build/, run for given sizes. `python bench/twin.py RECORD_BYTES LANE_BYTES` prints its rate.

Knows nothing of shmbridge.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
BINARY = SOURCE.parents[1] / "build" / "bench" / "twin"


@dataclass(frozen=True, slots=True)
class Rate:
    """Records moved in `seconds`, and what the writer's process spent on all of them."""

    records: int
    seconds: float
    writer_cpu_s: float

    @property
    def per_s(self) -> float:
        return self.records / self.seconds


def cores() -> tuple[int, int]:
    """Two cores of this process' set for writer and reader; the same one twice where there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


def compiled() -> Path:
    """The executable, compiled if it is missing or older than its source."""
    if not BINARY.exists() or BINARY.stat().st_mtime < SOURCE.stat().st_mtime:
        BINARY.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-std=gnu11", "-O3", "-Wall"]
        subprocess.run([os.environ.get("CC", "cc"), *flags, str(SOURCE), "-o", str(BINARY)], check=True)
    return BINARY


def run(record_bytes: int, lane_bytes: int, on: tuple[int, int], seconds: float = 2.0, sources: int = 4) -> Rate:
    """Moves records of this size for about `seconds` after two warming rounds, writer and reader on those cores. Blocks."""
    writer, reader = on
    argv = [str(compiled()), *map(str, (record_bytes, lane_bytes, seconds, sources, writer, reader))]
    records, took, cpu, _ = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    return Rate(int(records), float(took), float(cpu))


if __name__ == "__main__":
    record_bytes, lane_bytes = (int(each, 0) for each in sys.argv[1:3])
    rate = run(record_bytes, lane_bytes, cores())
    print(f"{rate.per_s:,.0f} records/s, {rate.per_s * record_bytes / 1e9:.2f} GB/s")
