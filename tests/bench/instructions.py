"""How much work `put`, `get`, five views and `release` are, counted by callgrind: no neighbour changes that.

    python tests/bench/instructions.py            # count this tree
    python tests/bench/instructions.py --write    # and make its figures the ones that it is held to

Counts are per call: instructions; calls of the extensions into libc, and into Python; and, of records larger
than the simulated cache, how often each byte of values is read and written. A few rounds are counted and the
lowest one taken. Counts depend on the builds of Python, NumPy, libc and this package, so the file names them.
The part below `main` runs under valgrind and knows public names alone: it counts older trees, too.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIGURES = HERE / "instructions.json"
SHAPES = ((8, 16), (8, 256))
LARGE = (8, 2048)  # whose bytes are counted
COLUMNS = ("tokens", "loss_mask", "advantages", "inference_logprobs", "token_rewards")
CALLS, ROUNDS = 60, 5
LARGE_CALLS = 10
LINE, D1 = 64, 8192  # of the simulated cache of data, whose lines may be anywhere in it

# What decides which of libc's routines run: without this it would ask the processor.
LIBC = "glibc.cpu.hwcaps=-ERMS:glibc.cpu.x86_non_temporal_threshold=0x4000000"
MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *what) { CALLGRIND_DUMP_STATS_AT(what); CALLGRIND_STOP_INSTRUMENTATION; }
"""

Figures = dict[str, dict[str, float]]  # by operation and shape: what is counted


class CannotCount(Exception):
    """What is missing here, and how to get it."""


def missing() -> str | None:
    """What a count needs and this machine lacks; None if all is there."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return f"the counts are of Linux on x86_64, not of {sys.platform} on {platform.machine()}"
    if shutil.which("valgrind") is None:
        return "no valgrind -> apt-get install valgrind"
    if shutil.which("cc") is None:
        return "no C compiler -> apt-get install gcc"
    probe = subprocess.run(
        ["cc", "-xc", "-fsyntax-only", "-"], input=MARKS, text=True, capture_output=True, check=False
    )
    return "no header of valgrind's -> install valgrind-devel" if probe.returncode else None


def versions() -> dict[str, str]:
    """What the counts depend on beside the tree."""
    import Cython
    import numpy as np

    def first_line(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]

    return {
        "python": sys.version,
        "numpy": np.__version__,
        "cython": Cython.__version__,
        "compiler": first_line("cc", "--version"),
        "libc": " ".join(platform.libc_ver()),
        "valgrind": first_line("valgrind", "--version"),
        "cpu": f"{platform.machine()}{' avx2' if 'avx2' in Path('/proc/cpuinfo').read_text() else ''}",
    }


def count(tree: Path = ROOT, slower: float = 0.0) -> Figures:
    """The figures of a built tree; `slower` has it do that share more than is counted. Blocks some 20 s.

    Raises CannotCount.
    """
    if (what := missing()) is not None:
        raise CannotCount(what)
    with tempfile.TemporaryDirectory(prefix="shmbridge-count-") as folder:
        marks = Path(folder) / "marks.so"
        compile_marks = ["cc", "-xc", "-O1", "-shared", "-fPIC", "-o", str(marks), "-"]
        subprocess.run(compile_marks, input=MARKS, text=True, check=True)
        command = [
            "valgrind",
            "--quiet",
            "--tool=callgrind",
            "--instr-atstart=no",
            "--cache-sim=yes",
            f"--D1={D1},{D1 // LINE},{LINE}",
            "--compress-strings=no",
            "--compress-pos=no",
            "--separate-threads=yes",
            f"--callgrind-out-file={folder}/count",
            sys.executable,
            str(Path(__file__).resolve()),
            "--child",
            str(marks),
            "--slower",
            str(slower),
        ]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "PYTHONPATH": str(tree),
            "PYTHONHASHSEED": "0",
            "SHMBRIDGE_CHECK_ROWS": str(SHAPES[0][0]),
            "GLIBC_TUNABLES": LIBC,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise CannotCount(f"valgrind ended with {done.returncode}: {done.stderr[-2000:]}")
        return _lowest(sorted(Path(folder).glob("count.*-01"), key=lambda each: int(each.suffix[1:-3])))


def _lowest(dumps: list[Path]) -> Figures:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps:
        said = re.search(r"Client Request: (.+) (\d+) (\d+)", dump.read_text())
        if said is None:
            continue
        what, calls, values = said[1], int(said[2]), int(said[3])
        events, into = _read(dump)
        if values:
            found[what]["read"].append(events["D1mr"] * LINE / calls / values)
            found[what]["written"].append(events["D1mw"] * LINE / calls / values)
        else:
            found[what]["instructions"].append(events["Ir"] / calls)
            found[what]["libc"].append(into["libc"] / calls)
            found[what]["python"].append(into["python"] / calls)
    return {
        what: {name: round(min(each), 3) for name, each in counted.items()} for what, counted in found.items()
    }


def _read(dump: Path) -> tuple[Counter[str], Counter[str]]:
    """The events of one dump, and the calls from the extensions into libc and into Python."""
    events: Counter[str] = Counter()
    into: Counter[str] = Counter()
    names: list[str] = []
    at = called = ""
    for line in dump.read_text().splitlines():
        if line.startswith("events:"):
            names = line.split()[1:]
        elif line.startswith("totals:"):
            events.update(dict(zip(names, map(int, line.split()[1:]), strict=True)))
        elif line.startswith("ob="):
            at = line[3:]
        elif line.startswith("cob="):
            called = line[4:]
        elif line.startswith("calls="):
            if "/_ext/" in at and called:
                kind = "libc" if "/libc." in called else "python" if "python" in Path(called).name else ""
                into[kind] += int(line[6:].split()[0])
            called = ""
        elif line.startswith("fn="):
            called = ""
    return events, into


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {FIGURES.name}")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a built tree of shmbridge")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--slower", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        work(given.child, given.slower)
        return
    figures = count(given.tree)
    for what, counted in figures.items():
        print(f"{what:20}", *(f"{name} {value:,.2f}" for name, value in counted.items()), sep="  ")
    if given.write:
        FIGURES.write_text(json.dumps({"versions": versions(), "figures": figures}, indent=1) + "\n")


# -- under valgrind


def work(marks: str, slower: float) -> None:
    """Does what is counted, one round after another."""
    import shmbridge

    library = ctypes.CDLL(marks)
    bridge = f"count-{os.getpid():07}"
    # Which rows carry checks depends on the time of the producer's birth. Here it is one in each group.
    clock, time.monotonic_ns = time.monotonic_ns, lambda: 0
    try:
        with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="64M") as producer:
            time.monotonic_ns = clock
            for rows, length in (*SHAPES, LARGE):
                group = _group(rows, length)
                size = sum(group[name][0].nbytes for name in COLUMNS) if (rows, length) == LARGE else 0
                calls = LARGE_CALLS if size else CALLS
                times = calls + round(calls * slower)
                for number in range(ROUNDS + 1):
                    records: list[Any] = []
                    # What comes now and then comes here: a collection, a look whether the lane has its name.
                    gc.collect()
                    producer.put(group)
                    consumer.get(timeout_s=1).release()
                    for what, do, arguments in (
                        ("put", _put, (producer, group, times)),
                        ("get", _get, (consumer, records, times)),
                        ("views", _views, (records,)),
                        ("release", _release, (records,)),
                    ):
                        counted = number > 0 and (what == "put" or not size)  # the first round warms up
                        if counted:
                            library.begin()
                        do(*arguments)
                        if counted:
                            library.end(f"{what} {rows}x{length} {calls} {size}".encode())
                    records.clear()
    finally:
        shmbridge.clean(bridge, dry_run=False)


def _put(producer: Any, group: Any, times: int) -> None:
    for _ in range(times):
        producer.put(group)


def _get(consumer: Any, records: list[Any], times: int) -> None:
    for _ in range(times):
        records.append(consumer.get(timeout_s=1))


def _views(records: list[Any]) -> None:
    for record in records:
        for name in COLUMNS:
            record[name].values  # noqa: B018


def _release(records: list[Any]) -> None:
    for record in records:
        record.release()


def _group(rows: int, length: int) -> dict[str, Any]:
    import numpy as np

    rng, lengths, count = np.random.default_rng(0), np.full(rows, length, np.int32), rows * length
    group: dict[str, Any] = {
        "tokens": (rng.integers(0, 1000, count, dtype=np.int32), lengths),
        "loss_mask": (rng.integers(0, 2, count, dtype=np.uint8), lengths),
        "score": np.zeros(rows),
    }
    return group | {name: (-rng.random(count, dtype=np.float32), lengths) for name in COLUMNS[2:]}


if __name__ == "__main__":
    main()
