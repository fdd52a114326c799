"""Metrics of a batch and its bridge at each step, under the names of `shmbridge.metrics`."""

from __future__ import annotations

from collections import Counter

import numpy as np

import shmbridge
from shmbridge.consumers.learner import Metrics
from shmbridge.hub.request import LAGS, staleness_of
from shmbridge.metrics import LatencyWindow, WaitingFor, batch_metrics, bridge_metrics, rows_by_environment

_WINDOW = 200  # records whose latency counts, or those of so many batches if that is more:
_BATCHES = 4


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
