"""Percentiles of buckets: within a bucket of numpy's, and of the last half minute or so."""

import numpy as np
import pytest

from shmbridge.hub import RecentLatency, percentile_s
from shmbridge.metrics import LATENCY_BOUNDS_S

BUCKETS = len(LATENCY_BOUNDS_S) + 1


def buckets(seconds: np.ndarray) -> list[int]:
    """Counts as latency.h does."""
    counts = [0] * BUCKETS
    for us in (seconds * 1e6).astype(np.int64):
        counts[min(int(us).bit_length(), BUCKETS - 1)] += 1
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_a_percentile_is_in_the_bucket_of_the_true_one(seed):
    seconds = np.random.default_rng(seed).lognormal(-7, 2.5, 3000)
    for percent in (1, 50, 99):
        true = float(np.percentile(seconds, percent, method="inverted_cdf"))
        assert true / 2 <= percentile_s(buckets(seconds), percent) <= true * 2


def test_percentiles_at_the_ends():
    assert percentile_s(buckets(np.array([0.0])), 99) <= 1e-6
    assert percentile_s(buckets(np.array([1e9])), 50) == LATENCY_BOUNDS_S[-1]


def test_what_was_long_ago_does_not_count():
    window, began = RecentLatency(), 1e9
    slow = buckets(np.full(100, 1.0))
    assert window.stats(slow, began)["latency_us_p50"] == pytest.approx(1e6, rel=1)
    fast = [a + b for a, b in zip(slow, buckets(np.full(100, 1e-5)), strict=True)]
    assert window.stats(fast, began + 29)["latency_us_p99"] > 1e5
    window.stats(fast, began + 31)
    faster = [a + b for a, b in zip(fast, buckets(np.full(100, 1e-5)), strict=True)]
    assert window.stats(faster, began + 62)["latency_us_p99"] < 20
    assert window.stats(faster, began + 93) == {}


def test_no_records_have_no_percentiles():
    assert RecentLatency().stats([0] * BUCKETS) == {}
