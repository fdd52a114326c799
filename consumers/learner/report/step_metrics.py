"""The metrics of each step: of its batch and bridge, of all ranks together, and of its time and cost.

Merging over ranks: counts are summed, the first text is kept, means are weighted by their counts, standard
deviations are pooled. Percentiles cannot be merged, so the highest of any rank is used.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

import shmbridge
from shmbridge.consumers.learner import Metrics
from shmbridge.consumers.learner.world import World
from shmbridge.hub import LAGS, staleness_of
from shmbridge.metrics import LatencyWindow, WaitingFor, batch_metrics, bridge_metrics, rows_by_environment

_WINDOW = 200  # records whose latency counts, or those of so many batches if that is more:
_BATCHES = 4
_HIGHEST = re.compile(r"_max$|_max_fresh$|_max_s$|_max_abs$|_p\d+$|_p\d+_ms$")
_COUNTED = re.compile(
    r"^atropos/(batch_groups|total_sequences|empty_response_count)$|^host_cpu_s$|^api_perf/(\w+_per_sec|slow_requests)$"
)
_OF_TOKENS = re.compile(r"^advantage_|^token_")
_DEVIATION = re.compile(r"^(\w+_)std()$|^(atropos/.+/)std(_\w+)$")
_OF_SCORES = re.compile(r"^reward_(mean|std)$|^atropos/mean_score$")
_OF_ENVIRONMENT = re.compile(r"^(atropos/.+/)(?:mean|std)_(score|advantage)$")
# the metric that counts trajectories with a score, and with an advantage
_COUNTS = {"score": "trajectories_scored", "advantage": "trajectories_trained"}
_OF_GROUPS = {"atropos/identical_score_rate": "groups_scored", "bridge/group_wait_s": "groups"}
Item = TypeVar("Item")
PHASES = ("copy", "forward", "backward", "sync")


class LearnerMetrics:
    """Computes metrics of batches of so many groups, of their bridge, and totals of this learner."""

    def __init__(self, groups: int) -> None:
        self._latency = LatencyWindow(max(_WINDOW, _BATCHES * groups))
        self._fallback_groups = 0
        self._waiting_for = WaitingFor()

    def taken(self, batch: shmbridge.Batch, now_ns: int, policy_version: int) -> Metrics:
        """Returns the batch's age and staleness, and the rate of records.

        Args:
            batch: a `shmbridge.Batch`, or anything with its metadata.
            now_ns: when it was taken (CLOCK_MONOTONIC, as the records' times).
            policy_version: the version about to be trained.
        """
        behind = staleness(batch, policy_version)
        stamped = [meta.min_policy_version for meta in batch.meta]
        known = (-1 if version is None or version > policy_version else version for version in stamped)
        lags = Counter(staleness_of(version, policy_version) for version in known)
        rows = Counter(id(meta) for meta in batch.meta)  # rows of one record share its metadata
        records = {id(meta): meta for meta in batch.meta}
        for key, meta in records.items():
            self._latency.add((now_ns - meta.t_publish_ns) / 1e9, items=rows[key], ended_s=now_ns / 1e9)
        committed_ns = np.array([meta.t_publish_ns for meta in batch.meta], np.int64)
        groups, ordinal = np.unique(batch.group_index, return_inverse=True)
        first_ns = np.full(groups.size, np.iinfo(np.int64).max)
        np.minimum.at(first_ns, ordinal, committed_ns)
        return {
            "staleness_mean": sum(behind) / len(behind) if behind else 0.0,
            "staleness_max": max(behind, default=0),
            # one bucket per version up to a few, one for all beyond, one for unknown
            **{f"staleness_hist_{lag}": lags[lag] for lag in LAGS},
            "age_mean_s": float((now_ns - committed_ns).mean()) / 1e9 if committed_ns.size else float("nan"),
            "age_max_s": float((now_ns - committed_ns).max(initial=0)) / 1e9,
            **batch_metrics(behind, (now_ns - first_ns) / 1e9),
            **self._latency.metrics(now_ns / 1e9),
        }

    def totals(self, measured: Metrics, stats: dict[str, float]) -> Metrics:
        """Returns the counters of the bridge and this learner, after a step with these metrics."""
        self._fallback_groups += measured["groups_fallback"]
        return {
            "dropped_total": stats["dropped_total"],  # by producers, of records that were never committed
            "discarded_total": stats["discarded_total"],  # by this bridge's consumers, of records in no batch
            "atropos/fallback_groups_total": self._fallback_groups,
            **bridge_metrics(stats),
            **self._waiting_for.metrics(stats),
        }


def rows_of_environments(batch: shmbridge.Batch) -> dict[str, int]:
    """Returns the number of trajectories per environment, by the environment's name in metrics."""
    return {
        name: rows.size for name, rows in rows_by_environment([meta.env_name for meta in batch.meta]).items()
    }


def staleness(batch: shmbridge.Batch, policy_version: int) -> list[int]:
    """Returns the staleness of each trajectory whose version is known and valid."""
    return [
        policy_version - version
        for version in (meta.min_policy_version for meta in batch.meta)
        if version is not None and 0 <= version <= policy_version
    ]


def of_all_ranks(world: World, share: Metrics, rows: dict[str, int]) -> Metrics:
    """Returns the metrics of the whole batch, on every rank; arguments of this rank, as `merged`."""
    said = world.all_gather([share, rows])
    return merged([each[0] for each in said], [each[1] for each in said])


def merged(shares: Sequence[Metrics], rows: Sequence[dict[str, int]]) -> Metrics:
    """Returns the metrics of the whole batch.

    Args:
        shares: of each rank; a rank may lack a name.
        rows: of each rank, the number of trajectories by the environment's name in metrics.
    """
    if len(shares) == 1:
        return dict(shares[0])
    names = dict.fromkeys(name for share in shares for name in share)
    means = {name: _merged(name, shares) for name in names}
    found = {name: _spread(name, shares, means) if _mean_of(name) else value for name, value in means.items()}
    if "atropos/num_environments" in found:
        found["atropos/num_environments"] = float(len({env for each in rows for env in each}))
    return found


def _merged(name: str, shares: Sequence[Metrics]) -> Any:
    values = [share[name] for share in shares if name in share]
    if _HIGHEST.search(name):
        return max(values)
    if isinstance(values[0], str):
        return values[0]
    if isinstance(values[0], bool):
        return any(values)
    if isinstance(values[0], int) or _COUNTED.search(name):
        return sum(values)
    return _weighted([(_weight(name, share), share[name]) for share in shares if name in share])


def _spread(name: str, shares: Sequence[Metrics], means: Metrics) -> float:
    """Returns the pooled standard deviation: within the shares and between their means."""
    mean = _mean_of(name)
    squares = [
        (_weight(name, share), share[name] ** 2 + share[mean] ** 2) for share in shares if name in share
    ]
    return math.sqrt(max(0.0, _weighted(squares) - means[mean] ** 2))


def _mean_of(name: str) -> str:
    """Returns the name of the mean that belongs to a standard deviation; "" if the name is not one."""
    found = _DEVIATION.search(name)
    return "mean".join(part for part in found.groups() if part is not None) if found else ""


def _weight(name: str, share: Metrics) -> float:
    """Returns the number of values behind a share's mean."""
    if (of := _OF_ENVIRONMENT.search(name)) is not None:
        count = of[1] + _COUNTS[of[2]]
    elif name == "token_staleness_mean":
        return float(share.get("trained_tokens", 0) - share.get("tokens_without_version", 0))
    elif _OF_SCORES.search(name):
        count = "trajectories_scored"
    else:
        count = _OF_GROUPS.get(name, "trained_tokens" if _OF_TOKENS.search(name) else "trajectories")
    return float(share.get(count, 0))


def _weighted(values: Sequence[tuple[float, float]]) -> float:
    """Returns the weighted mean of (weight, value) pairs without NaN; the plain mean if all weights are 0."""
    known = [(weight, value) for weight, value in values if math.isfinite(value)]
    if not known:
        return float("nan")
    total = sum(weight for weight, _ in known)
    if total == 0:
        return sum(value for _, value in known) / len(known)
    return sum(weight * value for weight, value in known) / total


class StepTimes:
    """Adds up the seconds of each phase of a step.

    On a GPU it measures device time, between two events of the stream. One thread.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Counts the block as one of `PHASES`. Phases do not nest."""
        if self._on_gpu:
            make: Any = torch.cuda.Event
            begin, end = make(enable_timing=True), make(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - begun

    def each(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items; the time to produce each counts for a phase."""
        coming = iter(items)
        while True:
            with self.of(phase):
                item = next(coming, None)
            if item is None:
                return
            yield item

    def taken(self) -> dict[str, float]:
        """Returns `<phase>_s` since the last call, and the peak GPU memory so far. Waits for the GPU."""
        if self._events:
            self._events[-1][2].synchronize()
        for phase, begin, end in self._events:
            self._seconds[phase] += begin.elapsed_time(end) / 1e3
        found = {f"{phase}_s": seconds for phase, seconds in self._seconds.items()}
        if self._on_gpu:
            found["device_memory_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._seconds, self._events = dict.fromkeys(PHASES, 0.0), []
        return found


class StepCost:
    """The total cost of each step, counted from the end of the one before. One thread; never blocks."""

    def __init__(self) -> None:
        self._ended, self._cpu = time.monotonic(), time.process_time()

    def cpu_s(self) -> float:
        """Returns the CPU seconds of this process since the last call."""
        cpu = time.process_time()
        spent, self._cpu = cpu - self._cpu, cpu
        return spent

    def step(self, waited_s: float, cpu_s: float, tokens: int) -> dict[str, float]:
        """Returns the metrics of the step that ends now, from sums over all ranks."""
        ended = time.monotonic()
        took, self._ended = ended - self._ended, ended
        return {
            "step_s": took,
            "idle_frac": waited_s / took if took > 0.0 else 0.0,
            "host_cpu_s_per_mtoken": cpu_s / tokens * 1e6 if tokens else float("nan"),
        }
