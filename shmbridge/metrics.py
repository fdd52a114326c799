"""Metrics under the usual dashboard names: flat dicts of numbers, for a log file or for W&B.

Every name is in docs/reference/metrics.md. Never blocks. Used by learners and gateways.

A name never contains a record, a pid or a producer, so that a run has as many names as it has environments,
and a few dozen more.
"""

import functools
import re
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shmbridge.counters import COUNTERS

MOST_ENVIRONMENTS = 64  # told apart in one batch; rows of further ones count under OTHER
OTHER = "other"
# Beyond it sums, squares and differences leave float32, so scores cannot be compared.
LARGEST_SCORE = 1e37
_UNNAMED = "unnamed"
_PERCENTILES = (50, 95, 99)

# Key of Consumer.stats() -> name.
_OF_STATS = {each.stats: each.metric for each in COUNTERS if each.stats} | {
    "latency_us_p50": "bridge/latency_push_to_poll_us_p50",
    "latency_us_p99": "bridge/latency_push_to_poll_us_p99",
}
_WITH_REASON = {each.stats: each.name.removesuffix("_total") for each in COUNTERS if each.per == "reason"}
_SOME = 0.05  # share of the time; a side that is waited for less is waited for by nobody


def rollout_metrics(
    env_names: Sequence[str],
    groups: npt.ArrayLike,
    scores: npt.ArrayLike,
    *,
    advantages: npt.ArrayLike | None = None,
    response_lengths: npt.ArrayLike | None = None,
) -> dict[str, float]:
    """Returns metrics of the trajectories of one batch, under `atropos/...`: over all of them and per
    environment.

    Never blocks.

    An undefined value, such as the mean of no scores, is NaN; arguments that were not passed have no names at
    all.

    Args:
        env_names: (B,), each trajectory's environment, which appears as `environment_label` writes it.
        groups: int (B,), ordinal of each trajectory's group, any numbers.
        scores: float (B,); NaN where a trajectory has none. NaN, infinite values and values beyond
            `LARGEST_SCORE` do not count as scores.
        advantages: float (B,), each trajectory's mean advantage over its trained tokens, dimensionless; NaN
            where there is none.
        response_lengths: int (B,), tokens from the first trained one to the end; 0 where no token is trained.

    Raises:
        ValueError: the arguments disagree in length.
    """
    score, group = np.asarray(scores, np.float64), np.asarray(groups)
    score = np.where(usable_scores(score), score, np.nan)
    per_row = [
        each for each in (score, group, _array(advantages), _array(response_lengths)) if each is not None
    ]
    if any(each.shape != (len(env_names),) for each in per_row):
        raise ValueError(
            f"{len(env_names)} environment names, and arrays of shape {[each.shape for each in per_row]}: "
            "one of each per row"
        )
    rows_of = rows_by_environment(env_names)
    found = {
        "atropos/mean_score": _mean(score),
        "atropos/num_environments": float(len(set(env_names))),
        "atropos/identical_score_rate": _identical_rate(group, score),
        "atropos/batch_groups": float(np.unique(group).size),
        "atropos/total_sequences": float(score.size),
    }
    for env_name, rows in rows_of.items():
        found[f"atropos/{env_name}/mean_score"] = _mean(score[rows])
        found[f"atropos/{env_name}/std_score"] = _std(score[rows])
    if advantages is not None:
        advantage = np.asarray(advantages, np.float64)
        for env_name, rows in rows_of.items():
            found[f"atropos/{env_name}/mean_advantage"] = _mean(advantage[rows])
            found[f"atropos/{env_name}/std_advantage"] = _std(advantage[rows])
    if response_lengths is not None:
        lengths = np.asarray(response_lengths, np.float64)
        found["atropos/avg_response_length"] = _mean(lengths)
        found["atropos/empty_response_count"] = float(np.count_nonzero(lengths == 0))
    return found


def usable_scores(scores: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Returns bool of the same shape: scores that are finite, and within `LARGEST_SCORE`. Never blocks."""
    usable: npt.NDArray[np.bool_] = np.abs(np.asarray(scores, np.float64)) <= LARGEST_SCORE
    return usable


def bridge_metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """Returns the counters of `Consumer.stats()`, under `bridge/...`.

    Never blocks; missing keys, and keys without a name, are left out.
    """
    found = {name: float(stats[key]) for key, name in _OF_STATS.items() if key in stats}
    for key, value in stats.items():
        counter, brace, reason = key.partition("{")
        if brace and counter in _WITH_REASON:
            found[f"bridge/{_WITH_REASON[counter]}_{reason.rstrip('}')}_total"] = float(value)
    if stats.get("lane_bytes") and {"held", "records_total", "bytes_total"} <= stats.keys():
        mean_bytes = stats["bytes_total"] / stats["records_total"] if stats["records_total"] else 0.0
        found["bridge/lane_fill_frac"] = min(1.0, stats["held"] * mean_bytes / stats["lane_bytes"])
    return found


def waiting_shares(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Returns who was waited for: for each side the share of the time between two `Consumer.stats()`.

    Never blocks. `environments`: somebody waited for a batch of theirs; `learner`: producers waited for room,
    mean over the living ones; `tap`: the consumer waited for a recording.

    Args:
        before, now: two stats() of one consumer; a missing key counts as 0.
        seconds: between them.
    """
    lanes = max(now.get("lanes_live", 0.0), before.get("lanes_live", 0.0), 1.0)
    sides = {
        "environments": ("batch_wait_s", 1.0),
        "learner": ("producer_wait_s", lanes),
        "tap": ("tap_wait_s", 1.0),
    }
    if seconds <= 0.0:
        return dict.fromkeys(sides, 0.0)
    return {
        side: min(max((now.get(key, 0.0) - before.get(key, 0.0)) / seconds / of, 0.0), 1.0)
        for side, (key, of) in sides.items()
    }


class WaitingFor:
    """Who was waited for since the call before, under `bridge/waiting_for...`. Never blocks; one thread."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, float]] | None = None

    def metrics(self, stats: Mapping[str, float], now_s: float | None = None) -> dict[str, float | str]:
        """Returns the shares of `waiting_shares`, and as text who was waited for most; nothing at first.

        The text is `nobody` if each was waited for less than a twentieth of the time.

        Args:
            stats: of `Consumer.stats()`.
            now_s: time.monotonic() of them; None for now.
        """
        now_s = time.monotonic() if now_s is None else now_s
        before, self._before = self._before, (now_s, dict(stats))
        if before is None:
            return {}
        shares = waiting_shares(before[1], stats, now_s - before[0])
        most = max(shares, key=shares.__getitem__)
        found: dict[str, float | str] = {
            f"bridge/waiting_for_{side}_frac": each for side, each in shares.items()
        }
        return found | {"bridge/waiting_for": most if shares[most] >= _SOME else "nobody"}


def batch_metrics(staleness: npt.ArrayLike, group_wait_s: npt.ArrayLike) -> dict[str, float]:
    """Returns the age of one batch, under `bridge/...`. Never blocks.

    Args:
        staleness: int (B,) or fewer, current policy version minus the one each trajectory began under, for
            stamped trajectories.
        group_wait_s: float (G,), seconds from the commit of each group's first record until its batch was
            taken.
    """
    behind = np.asarray(staleness, np.float64)
    return {
        "bridge/staleness_mean": float(behind.mean()) if behind.size else 0.0,
        "bridge/staleness_p90": float(np.percentile(behind, 90)) if behind.size else 0.0,
        "bridge/staleness_max": float(behind.max(initial=0.0)) if behind.size else 0.0,
        "bridge/group_wait_s": _mean(np.asarray(group_wait_s, np.float64)),
    }


class _Request(NamedTuple):
    ended_s: float
    latency_s: float
    items: int
    failed: bool
    raw_bytes: int
    wire_bytes: int


class LatencyWindow:
    """Latency and throughput of the last requests, under `api_perf/...`. Never blocks; one thread at a time.

    The caller defines a request: a gateway's are HTTP requests. A learner fed through lanes counts a
    record as one, from its commit (t_publish_ns) until the learner takes its batch.

    Args:
        window: how many of the last requests count.
        slow_s: a request that took longer is a slow one, in seconds.
    """

    def __init__(self, window: int = 200, slow_s: float = 5.0) -> None:
        if window < 1 or not slow_s > 0.0:
            raise ValueError(f"window={window} requests and slow_s={slow_s} s must both be above 0")
        self.slow_s = slow_s
        self._last: deque[_Request] = deque(maxlen=window)

    def add(
        self,
        latency_s: float,
        *,
        items: int = 1,
        failed: bool = False,
        raw_bytes: int = 0,
        wire_bytes: int = 0,
        ended_s: float | None = None,
    ) -> None:
        """Counts one request.

        Args:
            latency_s: how long it took; below 0 counts as 0.
            items: trajectories it carried.
            failed: whether it was answered with an error.
            raw_bytes, wire_bytes: size of a compressed body, unpacked and as it came; 0 where nothing was
                compressed.
            ended_s: time.monotonic() when it ended; None for now.
        """
        ended_s = time.monotonic() if ended_s is None else ended_s
        self._last.append(_Request(ended_s, max(0.0, latency_s), items, failed, raw_bytes, wire_bytes))

    def metrics(self, now_s: float | None = None) -> dict[str, float]:
        """Returns the window's metrics; none for an empty window.

        Rates count the requests that ended after the window's oldest, per second since then.

        Args:
            now_s: time.monotonic(); None for now.
        """
        if not self._last:
            return {}
        latencies_ms = np.array([each.latency_s for each in self._last]) * 1e3
        oldest_s = self._last[0].ended_s
        since = [each for each in self._last if each.ended_s > oldest_s]
        seconds = (time.monotonic() if now_s is None else now_s) - oldest_s
        per_second = 1.0 / seconds if seconds > 0.0 else 0.0
        percentiles = np.percentile(latencies_ms, _PERCENTILES).tolist()
        found = {
            f"api_perf/latency_p{p}_ms": value for p, value in zip(_PERCENTILES, percentiles, strict=True)
        }
        found |= {
            "api_perf/latency_mean_ms": float(latencies_ms.mean()),
            "api_perf/requests_per_sec": len(since) * per_second,
            "api_perf/items_per_sec": sum(each.items for each in since) * per_second,
            "api_perf/error_rate": sum(each.failed for each in self._last) / len(self._last),
            "api_perf/slow_requests": float(np.count_nonzero(latencies_ms > self.slow_s * 1e3)),
        }
        wire_bytes = sum(each.wire_bytes for each in self._last)
        if wire_bytes:
            found["api_perf/compression_ratio"] = (
                sum(each.raw_bytes for each in self._last if each.wire_bytes) / wire_bytes
            )
        return found


@functools.lru_cache(maxsize=4096)
def environment_label(env_name: str) -> str:
    """Returns the environment's name in metrics: two names never share one. Never blocks.

    Letters and digits of any script, `.`, `_` and `-` stay. Any other character becomes `_`, and the checksum
    of the whole name follows, as it does where the name is one that stands for something else here.
    """
    fit = re.sub(r"[^\w.-]", "_", env_name)
    if fit == env_name and fit not in ("", OTHER, _UNNAMED):
        return fit
    return f"{fit}-{zlib.crc32(env_name.encode()):08x}" if env_name else _UNNAMED


def rows_by_environment(env_names: Sequence[str]) -> dict[str, npt.NDArray[np.intp]]:
    """Returns each environment's label, and its rows, in order of appearance. Never blocks."""
    rows: dict[str, list[int]] = {}
    for row, env_name in enumerate(env_names):
        label = environment_label(env_name)
        if label not in rows and len(rows) >= MOST_ENVIRONMENTS:
            label = OTHER
        rows.setdefault(label, []).append(row)
    return {label: np.array(of_it, np.intp) for label, of_it in rows.items()}


def _identical_rate(group: npt.NDArray[Any], score: npt.NDArray[np.float64]) -> float:
    """Returns the share of groups whose scores are all the same number, of the groups that have a score."""
    counted = np.isfinite(score)
    groups, ordinal = np.unique(group[counted], return_inverse=True)
    if not groups.size:
        return float("nan")
    lowest, highest = np.full(groups.size, np.inf), np.full(groups.size, -np.inf)
    np.minimum.at(lowest, ordinal, score[counted])
    np.maximum.at(highest, ordinal, score[counted])
    return float(np.mean(lowest == highest))


def _array(values: npt.ArrayLike | None) -> npt.NDArray[Any] | None:
    return None if values is None else np.asarray(values)


def _mean(values: npt.NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def _std(values: npt.NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.std()) if finite.size else float("nan")
