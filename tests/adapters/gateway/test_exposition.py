"""What a gateway tells Prometheus: its bridge as observers see it, its own counters, its latency."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gateway_clients import GatewayProcess, group

from shmbridge.consumers.gateway.app import samples
from shmbridge.watch.exporter import Sample

OF = (("bridge", "run1"),)


def values(text: str) -> dict[str, float]:
    """Each sample line's value; the names of environments and reasons stay in the key."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    assert len({name for name, _, _ in lines}) == len(lines), "a series twice"
    return {name: float(value) for name, _, value in lines}


@pytest.mark.parametrize("mode", [(), ("--compat", "strict")], ids=["default", "strict"])
def test_a_gateway_is_scraped(
    start_gateway: Callable[..., GatewayProcess], bridge: str, mode: tuple[str, ...]
):
    gateway = start_gateway(*mode)
    gateway.start(batch_size=4)
    assert gateway.post("/scored_data", group(1)).status_code == 200
    assert gateway.post("/scored_data", {"tokens": [[1]]}).status_code == 422
    assert gateway.batch() is not None
    answer = gateway.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found, stats = values(answer.text), gateway.stats()
    of, types = f'bridge="{bridge}"', [line for line in answer.text.splitlines() if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)
    assert sum(value for name, value in found.items() if name.startswith("shmbridge_records_total")) == 1
    assert found[f"shmbridge_batches_total{{{of}}}"] == stats["bridge_batches_total"]
    assert found[f"shmbridge_consumer_up{{{of}}}"] == 1
    assert found[f"shmbridge_gateway_posts_total{{{of}}}"] == stats["posts_total"]
    assert found[f"shmbridge_gateway_api_perf_latency_p50_ms{{{of}}}"] > 0
    assert (
        sum(value for name, value in found.items() if name.startswith("shmbridge_gateway_refused_total")) == 1
    )


def test_names_in_braces_are_a_label_and_their_sum_is_left_out():
    counters = {
        "refused_total{too large}": 2,
        "refused_total": 2,
        "posts_total": 3,
        "api_perf/error_rate": 0.5,
    }
    assert list(samples("run1", counters)) == [
        Sample("shmbridge_gateway_refused_total", (*OF, ("reason", "too large")), 2),
        Sample("shmbridge_gateway_posts_total", OF, 3),
        Sample("shmbridge_gateway_api_perf_error_rate", OF, 0.5),
    ]


def test_the_consumers_own_are_those_that_observers_do_not_see():
    counters = {
        "bridge_records_total": 9,
        "bridge_batches_total": 2,
        "bridge_held": 1,
        "bridge_wait_s": float("nan"),
    }
    assert list(samples("run1", counters)) == [Sample("shmbridge_batches_total", OF, 2)]
