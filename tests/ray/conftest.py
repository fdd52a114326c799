"""A Ray cluster of three nodes on this machine: a learner's, and two with environments."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shmbridge
from shmbridge.testing import wait_until

# Everything stays on 127.0.0.1: with clusters of several machines Ray would take the address of this one.
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DOCKER_CPU_WARNING="1",
    RAY_health_check_period_ms="500", RAY_health_check_failure_threshold="3",  # of nodes: killed in tests
)  # fmt: skip
HERE = Path(__file__).parent
STORE_BYTES = 200 << 20
SUFFIX = {"env-1": "n1", "env-2": "n2"}  # the nodes share this machine's memory


class Cluster:
    """The cluster; nodes may be killed and added."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster as RayCluster

        self._nodes: dict[str, Any] = {}
        self._cluster = RayCluster()
        self.add("learner")
        self.add("env-1")
        self.add("env-2")
        self.address = self._cluster.address
        ray.init(address=self.address, namespace="shmbridge", log_to_driver=False)

    def add(self, name: str) -> None:
        labels = {"shmbridge-name": name, "shmbridge": "learner" if name == "learner" else "environments"}
        if name in SUFFIX:
            labels["shmbridge-suffix"] = SUFFIX[name]
        options = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "labels": labels}
        if name == "learner":
            options["include_dashboard"] = False
        self._nodes[name] = self._cluster.add_node(**options)

    def kill_raylet(self, name: str) -> None:
        """SIGKILL; Ray then holds the node for dead."""
        node = self._nodes.pop(name)
        node.all_processes["raylet"][0].process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def mend(self) -> None:
        """Adds what was killed."""
        for name in SUFFIX.keys() - self._nodes:
            self.add(name)

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.shutdown()


@contextlib.contextmanager
def bridges_of(bridge: str) -> Iterator[Callable[[str], str]]:
    """The bridge's name on a node; nothing is left of them afterwards."""
    yield lambda node: bridge + SUFFIX[node]
    for suffix in SUFFIX.values():
        shmbridge.clean(bridge + suffix, dry_run=False)


@pytest.fixture
def there(bridge: str) -> Iterator[Callable[[str], str]]:
    with bridges_of(bridge) as there:
        yield there


class Shared:
    """What the tests of one file share: a bridge, its names on nodes, and its relay."""

    def __init__(self, bridge: str, there: Callable[[str], str], relay: "Relay") -> None:
        self.bridge, self.there, self.relay = bridge, there, relay


@pytest.fixture(scope="module")
def shared(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Shared]:
    """With the flags of the relay that the file names."""
    bridge = f"t-shared-{os.getpid()}-{os.urandom(2).hex()}"
    cluster.mend()
    with bridges_of(bridge) as there:
        relay = Relay(bridge, cluster.address, *request.module.FLAGS)
        try:
            yield Shared(bridge, there, relay.ready("env-1", "env-2"))
        finally:
            relay.stop()
    assert not shmbridge.clean(bridge, dry_run=False).kept


class Relay:
    """`shmbridge relay --json`, and what it has said."""

    def __init__(self, bridge: str, address: str, *words: str) -> None:
        self._words = ["relay", "--bridge", bridge, "--address", address, "--json"]
        self.bridge, self.events, self.last = bridge, [], {}
        self.begin(*words)

    def begin(self, *words: str) -> None:
        command = [
            sys.executable,
            "-m",
            "shmbridge",
            *self._words,
            "--learner-label",
            "shmbridge=learner",
            *words,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stdout:
            said = json.loads(line)
            if said["event"] == "report":
                self.last = said
            else:
                self.events.append(said)

    def node(self, name: str) -> dict[str, float]:
        """What was last said of a node."""
        return self.last.get("nodes", {}).get(name, {})

    def wait(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Until a report makes it true."""
        wait_until(lambda: self.process.poll() is not None or condition(), timeout_s)
        assert condition(), f"relay ended with {self.process.returncode}"

    def ready(self, *nodes: str) -> "Relay":
        """Once these nodes answer."""
        self.wait(lambda: all("pid" in self.node(name) and name in self.last["sources"] for name in nodes))
        return self

    def stats_there(self, node: str) -> dict[str, float]:
        """The counters of a node's bridge, from the lanes' own words, as its relay has them."""
        import ray

        actor = ray.get_actor(self.last["sources"][node]["actor"], namespace="shmbridge")
        return ray.get(actor.stats.remote(), timeout=20)

    def end_for_good(self, actor: str) -> None:
        """Ray does not restart it."""
        import ray

        ray.kill(ray.get_actor(actor, namespace="shmbridge"))

    def kill(self) -> None:
        """The command itself, whose actors go on."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ends command and actors, as `--stop` does, which would take seconds to join the cluster."""
        from shmbridge.relay.ray import place

        self.kill()
        place.stop(self.bridge)

    def stop_by_command(self) -> list[str]:
        """Ends the actors; returns what is said."""
        words = [sys.executable, "-m", "shmbridge", *self._words[:-1], "--stop"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture
def make_relay(cluster: Cluster, bridge: str, there) -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    cluster.mend()

    def make(*words: str) -> Relay:
        made.append(Relay(bridge, cluster.address, *words))
        return made[-1].ready("env-1", "env-2")

    yield make
    for relay in made:
        relay.stop()


@pytest.fixture
def conserved() -> Callable[[dict[str, float]], None]:
    """Asserts that no record of a bridge is unaccounted for."""

    def check(stats: dict[str, float]) -> None:
        discarded = sum(count for name, count in stats.items() if name.startswith("discarded_total{"))
        assert stats["records_total"] == stats["released_total"] + stats["held"] + discarded, stats

    return check


class Environment:
    """A process that puts so many groups on a node."""

    def __init__(
        self, bridge: str, name: str, groups: int, tokens: int, pace_s: float, lane_bytes: str
    ) -> None:
        words = [bridge, name, str(groups), str(tokens), str(pace_s), lane_bytes]
        self.process = subprocess.Popen(
            [sys.executable, HERE / "environment.py", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.producer_id = self.process.stdout.readline().strip()
        assert self.producer_id

    def done(self) -> tuple[int, int]:
        """Blocks until it has put all; returns how many, and the policy version that it saw then."""
        count, version = self.process.stdout.readline().split()
        return int(count), int(version)

    def leave(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def make_environment(there) -> Iterator[Callable[..., Environment]]:
    made: list[Environment] = []

    def make(node: str, name: str = "gsm8k", groups: int = 100, tokens: int = 64, pace_s: float = 0.0,
             lane_bytes: str = "1M") -> Environment:  # fmt: skip
        made.append(Environment(there(node), name, groups, tokens, pace_s, lane_bytes))
        return made[-1]

    yield make
    for environment in made:
        environment.kill()
        environment.process.stdout.close()


class Learner:
    """A consumer that keeps the keys of what it took, per source, in order."""

    def __init__(self, consumer: shmbridge.Consumer) -> None:
        self.consumer, self.came = consumer, defaultdict(list)

    @property
    def count(self) -> int:
        return sum(map(len, self.came.values()))

    def take(self, count: int, timeout_s: float = 60.0) -> "Learner":
        """Until so many have come since the beginning."""
        until = time.monotonic() + timeout_s
        while self.count < count:
            try:
                record = self.consumer.get(timeout_s=max(until - time.monotonic(), 0.0))
            except shmbridge.ConsumerEmpty:
                raise AssertionError(f"{self.count} of {count} records within {timeout_s} s") from None
            with record:
                origin = record.meta.origin
                assert record["tokens"].values[0] == origin.sequence
                self.came[origin.producer_id].append(origin.sequence)
        return self

    def nothing_more(self, for_s: float = 0.5) -> None:
        with pytest.raises(shmbridge.ConsumerEmpty):
            self.consumer.get(timeout_s=for_s)


@pytest.fixture
def learner(consumer: shmbridge.Consumer) -> Learner:
    return Learner(consumer)
