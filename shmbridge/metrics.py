"""Every counter of a bridge with its names, and metrics under the usual dashboard names.

COUNTERS: the words that each is kept in, and its one name in stats(), metrics and Prometheus. The functions
return flat dicts of numbers, for a log file or for W&B; they never block. Used by learners and gateways. A
name never contains a record, a pid or a producer, so that a run has as many names as it has environments, and
a few dozen more. Every name is in docs/reference/metrics.md; tests hold the page to this table.
"""

import functools
import re
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# The bounds of the buckets of latency_counts in layout.h; the last bucket has none.
LATENCY_BOUNDS_S = tuple(float(1 << power) / 1e6 for power in range(29))


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter, or one value of the moment (a gauge).

    Args:
        name: without prefix: the last part of its names.
        kind: what Prometheus calls it.
        per: what has a value each; reason: of an environment.
        help: its meaning in a few words.
        stats: key of Consumer.stats(); "" if only observers see it.
        words: of layout.h that an observer reads; "": the consumer's own, or not from a word.
    """

    name: str
    _: KW_ONLY
    kind: Literal["counter", "gauge", "histogram"]
    per: Literal["mount", "bridge", "environment", "reason"]
    help: str
    stats: str = ""
    words: str = ""

    @property
    def metric(self) -> str:
        """Its name in metrics.jsonl and W&B; "" if only observers see it."""
        return f"bridge/{self.name}" if self.stats else ""

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus: base units in full, and `_total` at the end of every counter."""
        name = f"shmbridge_{self.name}"
        name = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
        return f"{name}_total" if self.kind == "counter" and not name.endswith("_total") else name


COUNTERS = (
    Counter(
        "records_total",
        stats="records_total",
        kind="counter",
        per="environment",
        words="tail",
        help="records committed",
    ),
    Counter(
        "released_total",
        stats="released_total",
        kind="counter",
        per="environment",
        words="released_total discarded_total",
        help="records read and released",
    ),
    Counter(
        "tokens_total",
        stats="tokens_total",
        kind="counter",
        per="environment",
        words="tokens_total",
        help="tokens in those committed",
    ),
    Counter(
        "logprobs_unrecorded_total",
        stats="logprobs_unrecorded_total",
        kind="counter",
        per="environment",
        words="logprobs_unrecorded_total",
        help="log-probabilities in those committed that were not recorded",
    ),
    Counter(
        "bytes_total",
        stats="bytes_total",
        kind="counter",
        per="environment",
        words="bytes_total",
        help="bytes taken by those committed",
    ),
    Counter(
        "drops_total",
        stats="dropped_total",
        kind="counter",
        per="reason",
        words="dropped_total",
        help="records given up by producers before they were committed",
    ),
    Counter(
        "discards_total",
        stats="discarded_total",
        kind="counter",
        per="reason",
        words="discarded_total quarantined",
        help="records committed, and released unread",
    ),
    Counter(
        "episodes_lost_total",
        stats="episodes_lost_total",
        kind="counter",
        per="reason",
        words="episodes_lost_total",
        help="episodes that environments began, and that are in no record",
    ),
    Counter(
        "wait_producer_s",
        stats="producer_wait_s",
        kind="counter",
        per="environment",
        words="wait_ns_total",
        help="time producers waited for room in their lanes",
    ),
    Counter(
        "wait_batch_s",
        stats="batch_wait_s",
        kind="counter",
        per="bridge",
        words="batch_wait_ns asking_ns",
        help="time somebody waited for a batch or record of this consumer",
    ),
    Counter(
        "wait_tap_s",
        stats="tap_wait_s",
        kind="counter",
        per="bridge",
        words="tap_wait_ns",
        help="time a tap that records kept this consumer waiting",
    ),
    Counter(
        "wait_consumer_s",
        stats="wait_s",
        kind="counter",
        per="bridge",
        help="time this consumer slept for records",
    ),
    Counter(
        "batches_total",
        stats="batches_total",
        kind="counter",
        per="bridge",
        help="batches handed out by this consumer",
    ),
    Counter(
        "leases_dropped_total",
        stats="leases_dropped_total",
        kind="counter",
        per="bridge",
        help="records read, and let go without release",
    ),
    Counter(
        "late_wakes_total",
        stats="late_wakes_total",
        kind="counter",
        per="bridge",
        help="sleeps ended by a tick that found work",
    ),
    Counter(
        "groups_begun_total",
        stats="groups_begun_total",
        kind="counter",
        per="bridge",
        help="tickets granted to producers that asked to begin a group",
    ),
    Counter(
        "latency_push_to_poll_s",
        kind="histogram",
        per="bridge",
        words="latency_counts latency_ns_total",
        help="time from a record's commit until this consumer handed it out first",
    ),
    Counter(
        "held", stats="held", kind="gauge", per="environment", help="records committed and not yet released"
    ),
    Counter("lane_bytes", stats="lane_bytes", kind="gauge", per="environment", help="memory of all lanes"),
    Counter(
        "lanes_live", stats="lanes_live", kind="gauge", per="environment", help="lanes whose producer lives"
    ),
    Counter(
        "lanes_dead",
        stats="lanes_dead",
        kind="gauge",
        per="environment",
        help="lanes whose producer is gone, and that still hold records",
    ),
    Counter(
        "lanes_quarantined",
        stats="lanes_quarantined",
        kind="gauge",
        per="environment",
        words="quarantined",
        help="lanes in which garbage was found",
    ),
    Counter(
        "lanes_refused",
        stats="lanes_refused",
        kind="gauge",
        per="bridge",
        help="lanes of another layout, or of other columns",
    ),
    Counter(
        "queue_groups",
        stats="queue_groups",
        kind="gauge",
        per="bridge",
        help="groups committed and not yet in a batch",
    ),
    Counter("groups_running", stats="groups_running", kind="gauge", per="bridge", help="tickets held now"),
    Counter(
        "policy_version",
        stats="policy_version",
        kind="gauge",
        per="bridge",
        words="policy_version",
        help="newest published version",
    ),
    # What observers see, and a consumer's stats() do not.
    Counter(
        "lanes_stopped", kind="gauge", per="environment", help="lanes whose producer is stopped by a signal"
    ),
    Counter(
        "lanes_blocked",
        kind="gauge",
        per="environment",
        words="blocked_ns",
        help="lanes in which a put waits now for room, or for the end of a pause",
    ),
    Counter("lanes_unread", kind="gauge", per="environment", help="lanes that the consumer has no room for"),
    Counter(
        "lane_fill_ratio", kind="gauge", per="environment", help="fill of the fullest lane, by bytes or slots"
    ),
    Counter(
        "lease_drops_held",
        kind="gauge",
        per="environment",
        words="leases_dropped",
        help="records that keep their room: read, and let go without release",
    ),
    Counter(
        "newest_put_age_s", kind="gauge", per="environment", help="time since the newest record was committed"
    ),
    Counter(
        "oldest_held_age_s",
        kind="gauge",
        per="environment",
        help="time since the oldest held record was committed",
    ),
    Counter(
        "lag_versions",
        kind="gauge",
        per="environment",
        help="versions between the newest policy and the one that began the newest record, most of all lanes",
    ),
    Counter(
        "segments_unreadable",
        kind="gauge",
        per="bridge",
        help="segments of another layout, or with garbage, that cannot be read from here",
    ),
    Counter(
        "environments_other",
        kind="gauge",
        per="bridge",
        help="environments with lanes that share the label other, beyond the first 64",
    ),
    Counter("consumer_up", kind="gauge", per="bridge", help="1 while a consumer lives"),
    Counter("consumer_stopped", kind="gauge", per="bridge", help="1 while it is stopped by a signal"),
    Counter("paused", kind="gauge", per="bridge", words="paused", help="1 while producers are held back"),
    Counter("draining", kind="gauge", per="bridge", words="draining", help="1 once no new records are taken"),
    Counter(
        "asking_s",
        kind="gauge",
        per="bridge",
        words="asking_ns",
        help="how long somebody waits for a batch or record by now",
    ),
    Counter(
        "batch_age_s",
        kind="gauge",
        per="bridge",
        words="handed_ns",
        help="time since the consumer handed a batch out",
    ),
    Counter(
        "version_age_s",
        kind="gauge",
        per="bridge",
        words="published_ns",
        help="time since the newest version was published",
    ),
    Counter("mount_free_bytes", kind="gauge", per="mount", help="free memory of the mount"),
    Counter("mount_bytes", kind="gauge", per="mount", help="memory of the mount"),
)


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
