"""What one relay moves from node to node of a Ray cluster, beside Ray's own queue actor and beside plain
ray.put and ray.get of the same groups: bytes a second, and CPU seconds per GB of all processes together.

Both nodes are on this machine: an object store each, and groups go from one to the other through Ray's own
transfer over the loopback. The ways take turns in one cluster. CPU time is that of this process and of all
that it started: raylets, the control store, workers. Every round is checked: the sum of all bytes read must
be that of the bytes handed over. Run by `make bench-ray`; method: bench/README.md.
"""

import contextlib
import os
import time
from statistics import median

import pytest

from shmbridge.bench import relay_ways

os.environ.update(relay_ways.ENVIRONMENT)
pytest.importorskip("ray", reason="needs an environment with Ray: make bench-ray")

from shmbridge.bench.cpu_time import cpu_s
from shmbridge.bench.groups import LARGE, MIDDLE, SMALL
from shmbridge.bench.relay_ways import WAYS, TwoNodes
from shmbridge.testing import wait_until

WARM_GROUPS = 64
full = pytest.mark.full


@pytest.fixture(scope="module")
def two_nodes():
    with TwoNodes() as cluster:
        yield cluster


def timed(way, count):
    """One round: seconds, CPU seconds by pid."""
    before, began = cpu_s(), time.perf_counter()
    total = way.carry(count)
    took, after = time.perf_counter() - began, cpu_s()
    assert total == relay_ways.sum_of(way.shape, count), "what was read is not what was handed over"
    return took, {pid: spent - before.get(pid, 0.0) for pid, spent in after.items()}


def per_gb(rows, shape, pid=None):
    """CPU seconds per GB of each round, of one process or of all."""
    return [
        1e9 * (sum(spent.values()) if pid is None else spent[pid]) / (count * shape.bytes)
        for count, _, spent in rows
    ]


@pytest.mark.timeout(600)
@pytest.mark.benchmark(group="relay")
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(each, id=str(each), marks=() if each is MIDDLE else full)
        for each in (SMALL, MIDDLE, LARGE)
    ],
)
def test_one_relay(benchmark, per_operation, quick, two_nodes, shape):
    seconds, rounds = (0.5, 3) if quick else (1.5, 5)
    found, pids = {name: [] for name in WAYS}, {}

    def measure():
        with contextlib.ExitStack() as stack:
            ways = {name: stack.enter_context(kind(shape)) for name, kind in WAYS.items()}
            counts = {}
            for name, way in ways.items():
                timed(way, WARM_GROUPS)
                took, _ = timed(way, WARM_GROUPS)
                counts[name] = max(int(seconds * WARM_GROUPS / took), 16)
                timed(way, counts[name])  # as much as a round: pages and caches are warm
            wait_until(lambda: ways["relay"].pids(), 30)
            pids.update(ways["relay"].pids())
            ways["relay's halves, without Ray"].parcels.clear()
            for _ in range(rounds):
                for name, way in ways.items():
                    found[name].append((counts[name], *timed(way, counts[name])))
            parcels = [each for each in ways["relay's halves, without Ray"].parcels if each[0]]
            benchmark.extra_info["accept"] = {
                "mb_per_s": sum(size for _, size, _ in parcels) / 1e6 / sum(took for *_, took in parcels),
                "ms_per_parcel": 1e3 * median(took for *_, took in parcels),
                "records_per_parcel": median(records for records, *_ in parcels),
            }

    benchmark.extra_info["label"] = str(shape)
    benchmark.pedantic(measure, rounds=1)
    per_operation([took / count for count, took, _ in found["relay"]], tokens=shape.tokens)
    print(f"\n{shape}; accept: {benchmark.extra_info['accept']}")
    for part, pid in pids.items():
        benchmark.extra_info[f"{part}_cpu_s_per_gb"] = median(per_gb(found["relay"], shape, pid))
        print(f"of the relay's, {part}: {benchmark.extra_info[f'{part}_cpu_s_per_gb']:.2f} CPU s/GB")
    for name, rows in found.items():
        rates = [count * shape.bytes / 1e6 / took for count, took, _ in rows]
        figures = {
            "mb_per_s": median(rates),
            "mb_per_s_range": [min(rates), max(rates)],
            "groups_per_s": median(count / took for count, took, _ in rows),
            "cpu_s_per_gb": median(per_gb(rows, shape)),
            # neighbours in time
            "relay_is": median(
                (mine[0] / mine[1]) / (its[0] / its[1])
                for mine, its in zip(found["relay"], rows, strict=True)
            ),
        }
        benchmark.extra_info[name] = figures
        print(
            f"{name:28} {figures['mb_per_s']:8,.0f} MB/s ({min(rates):,.0f} - {max(rates):,.0f})  "
            f"{figures['groups_per_s']:8,.0f} groups/s  {figures['cpu_s_per_gb']:6.2f} CPU s/GB  "
            f"the relay moves {figures['relay_is']:.2f}x"
        )


@pytest.mark.timeout(120)
@pytest.mark.benchmark(group="relay")
def test_calls_without_records(benchmark, per_operation, quick, two_nodes):
    """What hundreds of nodes cost that have nothing: a pull of an idle source, a report to the directory."""
    import ray

    from shmbridge.relay.ray.actors import SourceActor
    from shmbridge.relay.ray.directory import Directory, Report, encode
    from shmbridge.relay.wire import PullRequest, encode_request

    bridge = f"bench-{os.getpid()}-idle"
    there = {"num_cpus": 0, "label_selector": dict([relay_ways.ENVIRONMENTS])}
    source = ray.remote(SourceActor).options(**there).remote(bridge, "env-1")
    directory = ray.remote(Directory).options(num_cpus=0).remote()
    report = Report("learner", 1, nodes={f"env-{n}": dict.fromkeys("abcdefghijkl", 1.0) for n in range(256)})
    calls = {
        "pull_of_an_idle_source": lambda n: source.pull.remote(
            encode_request(PullRequest("s", n, {}, {}, {}, 1 << 20))
        ),
        "report_of_256_nodes": lambda _: directory.exchange.remote(encode(report)),
    }
    found = {name: [] for name in calls}

    def measure():
        for number in range(50 if quick else 300):
            for name, call in calls.items():
                began = time.perf_counter()
                ray.get(call(number), timeout=30)
                found[name].append(time.perf_counter() - began)

    benchmark.extra_info["label"] = "calls"
    benchmark.pedantic(measure, rounds=1)
    per_operation(found["pull_of_an_idle_source"])
    ray.get(source.stop.remote(), timeout=30)
    for actor in (source, directory):
        ray.kill(actor)
    relay_ways.remove(bridge)
    for name, took in found.items():
        took.sort()
        p50, p99 = (1e3 * took[int(len(took) * share)] for share in (0.5, 0.99))
        benchmark.extra_info[name] = {"p50_ms": p50, "p99_ms": p99}
        print(f"\n{name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
