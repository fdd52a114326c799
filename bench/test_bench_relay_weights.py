"""Time of one version of the weights from the learner's node to another of a Ray cluster, beside plain
ray.put and ray.get of the same tensor, and CPU seconds per GB of all processes together.

Both nodes are on this machine. The relay's time begins when the learner's `publish` returns, and ends when an
engine on the other node is woken and may read; Ray's begins before `ray.put` and ends when an actor there has
the array, or a copy of it in memory of its own, as an engine needs it that outlives the object. Run by `make
bench-ray`; method: bench/README.md.
"""

import os
import time
from statistics import median

import pytest

from shmbridge.bench import relay_ways

os.environ.update(relay_ways.ENVIRONMENT)
pytest.importorskip("ray", reason="needs an environment with Ray: make bench-ray")

import numpy as np

from shmbridge.bench.cpu_time import cpu_s
from shmbridge.weights import WeightsReader, WeightsWriter

STORE_BYTES = 1500 << 20
SIZES = {"2 MB": 2 << 20, "500 MB": 500 << 20}
ROUNDS = {"2 MB": 30, "500 MB": 6}
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def two_nodes():
    with relay_ways.TwoNodes(STORE_BYTES) as cluster:
        yield cluster


class Engine:
    """On the other node: takes arrays out of its object store."""

    def __init__(self):
        self._own = None

    def look(self, array):
        """The array's last value, in place."""
        return float(array.reshape(-1)[-1])

    def copy(self, array):
        """The same of a copy, in memory that is used again."""
        if self._own is None or self._own.shape != array.shape:
            self._own = np.empty_like(array)
        np.copyto(self._own, array)
        return float(self._own.reshape(-1)[-1])


class Relayed:
    """A version published on the learner's bridge, until the other node's bridge has it."""

    def __init__(self, size):
        from shmbridge.relay.ray import place

        self._place = place
        self.bridge = f"bench-{os.getpid()}-{size}"
        place.Placement(place.Plan(self.bridge, relay_ways.ENVIRONMENTS, relay_ways.LEARNER)).reconcile()
        self._writer, self._engine = WeightsWriter(self.bridge), WeightsReader(f"{self.bridge}-env")
        self._version = -1

    def prepare(self, array):
        """Publishes; this is the learner's own time."""
        self._version += 1
        self._writer.publish(self._version, [("w", array)])

    def carry(self, array):
        self._engine.wait(None if self._version == 0 else self._version - 1, TIMEOUT_S)
        with self._engine.lease(version=self._version) as lease:
            return float(lease.tensors["w"].reshape(-1)[-1])

    def close(self):
        self._place.stop(self.bridge)
        self._engine.close()
        self._writer.close()
        for bridge in (self.bridge, f"{self.bridge}-env"):
            relay_ways.remove(bridge)


class Stored:
    """ray.put here, an actor there that is given the reference."""

    def __init__(self, copied):
        import ray

        there = {"num_cpus": 0, "label_selector": dict([relay_ways.ENVIRONMENTS])}
        self._actor = ray.remote(Engine).options(**there).remote()
        self._call = self._actor.copy if copied else self._actor.look

    def prepare(self, array):
        pass

    def carry(self, array):
        import ray

        return ray.get(self._call.remote(ray.put(array)), timeout=TIMEOUT_S)

    def close(self):
        import ray

        ray.kill(self._actor)


@pytest.mark.timeout(600)
@pytest.mark.benchmark(group="relay")
@pytest.mark.parametrize("size", SIZES)
def test_weights_to_another_node(benchmark, per_operation, quick, two_nodes, size):
    rounds = 3 if quick else ROUNDS[size]
    ways = {
        "relay": Relayed(SIZES[size]),
        "ray.put, ray.get": Stored(copied=False),
        "ray.put, ray.get, a copy": Stored(copied=True),
    }
    array = np.zeros((SIZES[size] // 4096, 1024), np.float32)
    found = {name: [] for name in ways}
    published = []

    def one(number, way):
        array[:] = number
        began = time.perf_counter()
        way.prepare(array)
        prepared, cpu_before = time.perf_counter(), sum(cpu_s().values())
        again = time.perf_counter()
        assert way.carry(array) == number
        return prepared - began, time.perf_counter() - again, sum(cpu_s().values()) - cpu_before

    def measure():
        for number in range(rounds + 2):
            for name, way in ways.items():
                prepare_s, took, cpu = one(number, way)
                if number >= 2:  # pages are there
                    found[name].append((took, cpu))
                    if name == "relay":
                        published.append(prepare_s)

    benchmark.extra_info["label"] = size
    try:
        benchmark.pedantic(measure, rounds=1)
    finally:
        for way in ways.values():
            way.close()
    per_operation([took for took, _ in found["relay"]])
    benchmark.extra_info["publish_ms"] = 1e3 * median(published)
    print(f"\n{size}: the learner's publish {benchmark.extra_info['publish_ms']:.1f} ms")
    for name, rows in found.items():
        times = sorted(took for took, _ in rows)
        figures = {
            "ms": 1e3 * median(times),
            "ms_range": [1e3 * times[0], 1e3 * times[-1]],
            "cpu_s_per_gb": 1e9 * median(cpu for _, cpu in rows) / SIZES[size],
            "cpu_ms": 1e3 * sum(cpu for _, cpu in rows) / len(rows),
            "relay_takes": median(mine[0] / its[0] for mine, its in zip(found["relay"], rows, strict=True)),
        }
        benchmark.extra_info[name] = figures
        print(
            f"{name:26} {figures['ms']:8.1f} ms ({1e3 * times[0]:.1f} - {1e3 * times[-1]:.1f})  "
            f"CPU {figures['cpu_ms']:7.1f} ms  the relay takes {figures['relay_takes']:.2f}x"
        )
