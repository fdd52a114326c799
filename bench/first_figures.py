"""First figures: full groups from Python lists and from arrays through one lane, beside the C twin in the same run.

`python bench/first_figures.py [--json FILE]`, about 30 s. Method: bench/README.md. Knows public words only.
"""

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import twin

import shmbridge

SEED = 20260101
ROWS, LENGTH = 8, 2048
TOKENS = ROWS * LENGTH
SOURCES = 4  # different groups, put in turn
CORES = twin.cores()  # before this process pins itself
COLUMNS = ("tokens", "loss_mask", "advantages", "inference_logprobs")


# -- the groups -------------------------------------------------------------------------------------------------------------------


def arrays(seed: int) -> dict[str, Any]:
    """One group as an environment with arrays has it."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(LENGTH, np.uint8)
    mask[LENGTH // 4 :] = 1
    return {
        "tokens": [rng.integers(0, 150_000, LENGTH, dtype=np.int32) for _ in range(ROWS)],
        "loss_mask": [mask.copy() for _ in range(ROWS)],
        "scores": [float(score) for score in rng.normal(size=ROWS)],
        "advantages": [rng.normal(size=LENGTH).astype(np.float32) for _ in range(ROWS)],
        "inference_logprobs": [-rng.exponential(size=LENGTH).astype(np.float32) for _ in range(ROWS)],
    }


def lists(seed: int) -> dict[str, Any]:
    """The same group as Atropos has it: lists, masks of -100 and token ids."""
    group = arrays(seed)
    tokens = [row.tolist() for row in group["tokens"]]
    masks = group["loss_mask"]
    return {
        "tokens": tokens,
        "masks": [[token if kept else -100 for token, kept in zip(*pair, strict=True)] for pair in zip(tokens, masks, strict=True)],
        "scores": group["scores"],
        "advantages": [row.tolist() for row in group["advantages"]],
        "inference_logprobs": [row.tolist() for row in group["inference_logprobs"]],
    }


FORMS = {"lists": lists, "arrays": arrays}


# -- two processes ----------------------------------------------------------------------------------------------------------------


def produce(bridge: str, form: str, warm: int, count: int, lane_bytes: int, core: int) -> None:
    """The environment's process: puts warm + count groups; prints the CPU seconds of the last `count` puts."""
    os.sched_setaffinity(0, {core})
    groups = [FORMS[form](SEED + n) for n in range(SOURCES)]
    with shmbridge.Producer(bridge, env_name=form, lane_bytes=lane_bytes) as producer:
        for n in range(warm):
            producer.put(groups[n % SOURCES])
        began = time.process_time()
        for n in range(count):
            producer.put(groups[n % SOURCES])
        cpu_s = time.process_time() - began
        stats = producer.stats()
        bytes_each = stats["bytes_total"] / stats["records_total"]
        print(json.dumps({"cpu_s": cpu_s, "wait_s": stats["wait_s"], "bytes_each": bytes_each, "late_wakes": stats["late_wakes_total"]}))


def touch(record: shmbridge.Record) -> int:
    """Reads every byte of every per-token column in place, as sums of 8-byte words."""
    return sum(int(record[name].values.view(np.uint64).sum()) for name in COLUMNS)


def through_a_lane(form: str, warm: int, count: int, lane_bytes: int) -> dict[str, float]:
    """One measurement: this process is the consumer, a child the producer."""
    bridge = f"bench-{os.getpid()}"
    os.sched_setaffinity(0, {CORES[1]})
    with shmbridge.Consumer(bridge) as consumer:
        argv = [sys.executable, __file__, "--produce", json.dumps([bridge, form, warm, count, lane_bytes, CORES[0]])]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        for _ in range(warm):
            with consumer.get(20) as record:
                touch(record)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            with consumer.get(20) as record:
                touch(record)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        out, _ = child.communicate()
    said = json.loads(out)
    return {"per_s": count / took, "producer_cpu_ms": 1e3 * said["cpu_s"] / count, "consumer_cpu_ms": 1e3 * cpu / count, **said}


def as_json_and_gzip(repeats: int = 3) -> tuple[float, int]:
    """CPU milliseconds and bytes of the same group as gzip'd JSON."""
    group, times = lists(SEED), []
    for _ in range(repeats):
        began = time.process_time()
        packed = gzip.compress(json.dumps(group).encode())
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times), len(packed)


# -- the run ----------------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    info = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in info.items()}
    try:
        revision = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"
    return {
        "cpu": named.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "shmbridge": shmbridge.__version__,
        "revision": revision,
        "seed": SEED,
    }


def measure(lane_bytes: int, rounds: int) -> dict[str, Any]:
    about = machine()
    bytes_each = int(through_a_lane("arrays", 8, 8, lane_bytes)["bytes_each"])
    warm = 2 * lane_bytes // bytes_each
    runs: dict[str, list[dict[str, float]]] = {"twin": [], "arrays": [], "lists": []}
    for _ in range(rounds):  # in turn, so that all see the same neighbours
        rate = twin.run(bytes_each, lane_bytes, CORES, 1.5, SOURCES)
        runs["twin"].append({"per_s": rate.per_s, "producer_cpu_ms": 1e3 * rate.writer_cpu_s / rate.records})
        runs["arrays"].append(through_a_lane("arrays", warm, 10_000, lane_bytes))
        runs["lists"].append(through_a_lane("lists", warm, 3_000, lane_bytes))
    json_ms, json_bytes = as_json_and_gzip()
    rows = {}
    for name, results in runs.items():
        middle = {key: statistics.median(each[key] for each in results) for key in results[0]}
        rows[name] = {
            "groups_per_s": middle["per_s"],
            "tokens_per_s": middle["per_s"] * TOKENS,
            "mb_per_s": middle["per_s"] * bytes_each / 1e6,
            "of_twin": middle["per_s"] / statistics.median(each["per_s"] for each in runs["twin"]),
            "producer_cpu_ms_per_group": middle["producer_cpu_ms"],
            "consumer_cpu_ms_per_group": middle.get("consumer_cpu_ms"),
            "producer_wait_s": middle.get("wait_s"),
            "late_wakes": sum(each.get("late_wakes", 0) for each in results),
            "spread_groups_per_s": [min(each["per_s"] for each in results), max(each["per_s"] for each in results)],
        }
    return {
        "machine": about,
        "group": {"rows": ROWS, "tokens": TOKENS, "bytes": bytes_each, "columns": [*COLUMNS, "score"]},
        "lane_bytes": lane_bytes,
        "rounds": rounds,
        "json_gzip": {"cpu_ms_per_group": json_ms, "bytes": json_bytes},
        "rows": rows,
    }


def show(figures: dict[str, Any]) -> None:
    about, group = figures["machine"], figures["group"]
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load_before']:.1f} before")
    print(f"Python {about['python']}, numpy {about['numpy']}, revision {about['revision']}, seed {about['seed']}")
    print(f"groups of {group['rows']} x {LENGTH} tokens, {group['bytes']:,} bytes")
    print(f"lane of {figures['lane_bytes'] >> 20} MiB, medians of {figures['rounds']} rounds\n")
    print(f"{'':10}{'groups/s':>12}{'tokens/s':>16}{'MB/s':>10}{'of twin':>10}{'producer CPU':>16}{'consumer CPU':>16}")
    for name, row in figures["rows"].items():
        consumer = f"{row['consumer_cpu_ms_per_group']:.3f} ms" if row["consumer_cpu_ms_per_group"] is not None else ""
        print(
            f"{name:10}{row['groups_per_s']:>12,.0f}{row['tokens_per_s']:>16,.0f}{row['mb_per_s']:>10,.0f}{row['of_twin']:>10.0%}"
            f"{row['producer_cpu_ms_per_group']:>13.3f} ms{consumer:>16}"
        )
    packed = figures["json_gzip"]
    ratio = packed["cpu_ms_per_group"] / figures["rows"]["lists"]["producer_cpu_ms_per_group"]
    print(f"\njson + gzip of the same group: {packed['cpu_ms_per_group']:.0f} ms CPU, {packed['bytes']:,} bytes")
    print(f"that is {ratio:,.0f} puts from lists")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--lane-bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--produce", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        produce(*json.loads(options.produce))
        return
    figures = measure(options.lane_bytes, options.rounds)
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
