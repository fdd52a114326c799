"""End to end, beside today's baseline: the same groups through Atropos' own HTTP server and through a bridge.

Groups of 8 trajectories with tokens, masks, scores, per-token advantages and logprobs; the same values for
all, Python lists as an environment has them, or arrays. The environment is a process of its own, so are the
server and the trainer.

- **http**: BaseEnv of atroposlib 0.4, its workers from `collect_trajectories` to its own JSON, gzip and
  retries; `run-api` as it ships; a trainer that fetches as upstream's example does, but looks again after 20
  ms where that one sleeps a second, and leaves the groups as lists where that one goes on to arrays. Three
  groups are under way at a time: more would wait longer in the server and come no faster. BaseEnv's requests
  for its status, ten times a second, are left out.
- **base_env**: the same environment, unedited, with its traffic on a bridge. The remaining cost is BaseEnv's
  own: it counts masks and decodes a rollout of every group.
- **lists**, **arrays** (flat, with lengths), **row_arrays** (a list of arrays): `Producer.put` in a loop; a
  Consumer that reads every byte of every column in place. The lane has 64 MiB.

Environment and trainer have a core each, the same ones for all. The server has a third one; where there are
only two cores it shares the trainer's, which takes about a tenth of HTTP's rate (a tenth of that core's time
is the trainer's).

Windows are counted by what arrives, after a warm-up that imports, fills pages and caches; a figure is the
median of the rounds. Latency is from hand-over to arrival with three groups under way, and alone: with one. A
stall is the longest time between two ticks, of a millisecond each, of the environment's event loop; `put` is
measured there as `put_async`, a group a turn. On a machine with other work the longest stall is the
scheduler's, and only the CPU seconds are reliable.
"""

from statistics import median
from typing import Any

import pytest

from shmbridge.bench.atropos_http import UNDER_WAY
from shmbridge.bench.flow import Flow, cores
from shmbridge.bench.groups import ROWS
from shmbridge.bench.machine import LANE_BYTES

pytest.importorskip("atroposlib")
full = pytest.mark.full
LABELS = {
    "http": "Atropos, BaseEnv over HTTP",
    "base_env": "shmbridge, BaseEnv unedited",
    "lists": "shmbridge, put from lists",
    "arrays": "shmbridge, put from arrays",
    "row_arrays": "shmbridge, put from row arrays",
}


class Today(dict[int, dict[str, Any]]):
    """HTTP's figures by length, measured once in a run, on first use where its own test has not run."""

    def __missing__(self, length: int) -> dict[str, Any]:
        with Flow("http", length, window=UNDER_WAY) as flow:
            flow.go(groups=UNDER_WAY)
            self[length] = flow.go(seconds=6)
        self[length] |= flow.stalls
        return self[length]


@pytest.fixture(scope="module")
def today():
    return Today()


def measure(
    benchmark: Any, per_operation: Any, flow: Flow, *, warm: int, seconds: float, rounds: int
) -> dict[str, Any]:
    """Windows of about so many seconds, whose groups the benchmark is told; returns the medians of their
    figures.
    """
    benchmark.group = f"end to end, groups of {ROWS} x {flow.length}"
    windows = []
    with flow:
        groups = flow.warm(warm, seconds)
        benchmark.pedantic(lambda: windows.append(flow.go(groups=groups)), rounds=rounds)
    per_operation(
        [each["seconds"] / each["groups"] for each in windows], operations=groups, tokens=ROWS * flow.length
    )
    middle = medians(windows) | flow.stalls
    rates = [each["tokens_per_s"] for each in windows]
    return middle | {"spread_tokens_per_s": [min(rates), max(rates)], "rounds": rounds, "cores": cores()}


def medians(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Key by key, also of dicts in dicts."""
    return {
        key: medians([each[key] for each in windows])
        if isinstance(value, dict)
        else median(each[key] for each in windows)
        for key, value in windows[0].items()
    }


def latency(flow: Flow, groups: int) -> dict[str, float]:
    with flow:
        flow.go(groups=max(groups // 5, 2))
        return flow.go(groups=groups)["latency_ms"]


def stalls(flow: Flow, groups: int) -> dict[str, float]:
    with flow:
        flow.go(groups=groups // 2)
        flow.go(groups=groups)
    return flow.stalls


def against(http: dict[str, Any], here: dict[str, Any]) -> dict[str, float]:
    """How many times better than HTTP in this run."""
    environment = [each["cpu_s_per_million_tokens"]["environment"] for each in (http, here)]
    return {
        "tokens_per_s": here["tokens_per_s"] / http["tokens_per_s"],
        "cpu_in_all": http["cpu_s_per_million_tokens_in_all"] / here["cpu_s_per_million_tokens_in_all"],
        "cpu_of_the_environment": environment[0] / environment[1],
        "latency_p50": http["latency_ms"]["p50"] / here["latency_ms"]["p50"],
        "longest_stall": http["longest_stall_ms"] / here["longest_stall_ms"],
        "p99_tick": http["p99_tick_ms"] / here["p99_tick_ms"],
    }


def say(benchmark: Any, how: str, length: int, figures: dict[str, Any]) -> None:
    benchmark.extra_info["label"] = f"{LABELS[how]}, {ROWS} x {length}"
    benchmark.extra_info.update({"how": how, "tokens_each": length, "lane_bytes": LANE_BYTES, **figures})


@pytest.mark.parametrize("length", [2048, pytest.param(512, marks=full)])
def test_http(benchmark, per_operation, today, quick, length):
    seconds, rounds = (4.0, 1) if quick else (6.0 if length == 2048 else 3.0, 3)
    figures = measure(
        benchmark,
        per_operation,
        Flow("http", length, window=UNDER_WAY),
        warm=2 * UNDER_WAY,
        seconds=seconds,
        rounds=rounds,
    )
    today[length] = figures
    if not quick and length == 2048:
        figures["latency_alone_ms"] = latency(Flow("http", length, window=1), 10)
    say(benchmark, "http", length, figures)
    assert figures["cpu_s_per_million_tokens"]["server"] > 0


@full
def test_base_env(benchmark, per_operation, today):
    figures = measure(benchmark, per_operation, Flow("base_env", 2048), warm=1000, seconds=1.0, rounds=3)
    figures["latency_ms"] = latency(Flow("base_env", 2048, window=UNDER_WAY), 2000)
    say(benchmark, "base_env", 2048, figures | {"times_http": against(today[2048], figures)})


@pytest.mark.parametrize("form", ["lists", "arrays", pytest.param("row_arrays", marks=full)])
@pytest.mark.parametrize("length", [2048, 512])
def test_bridge(benchmark, per_operation, today, quick, form, length):
    lane = LANE_BYTES // (13 * ROWS * length)  # groups that fit
    figures = measure(
        benchmark,
        per_operation,
        Flow("put", length, form),
        warm=4 * lane,
        seconds=0.5 if quick else 1.0,
        rounds=1 if quick else 5,
    )
    figures["latency_ms"] = latency(Flow("put", length, form, UNDER_WAY), 1000 if quick else 5000)
    if not quick:
        figures["latency_alone_ms"] = latency(Flow("put", length, form, 1), 5000)
    figures |= stalls(Flow("put_async", length, form), 1000 if quick else 5000)
    if not quick or length == 2048:
        figures["times_http"] = against(today[length], figures)
    say(benchmark, form, length, figures)
    assert figures["tokens_per_s"] > 0
