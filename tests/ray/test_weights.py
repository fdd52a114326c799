"""The learner's weights reach the segments of other nodes over Ray: kills, stops, a fast learner."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import pytest
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

import shmbridge
from shmbridge.relay.ray.actors import receiver_name, sender_name
from shmbridge.relay.ray.directory import NAMESPACE, Placed, WeightsReport, table
from shmbridge.relay.ray.place import report
from shmbridge.testing import wait_until
from shmbridge.weights import WeightsReader, WeightsWriter
from shmbridge.weights.table import open_weights_segment

NODES = ("env-1", "env-2")
FLAGS = ()  # of the relay that the tests share
MIB = 1 << 20
LARGE = 64 * MIB


def model(version: int, size: int = MIB) -> list[tuple[str, np.ndarray]]:
    """Tensors of so many bytes, more or less, all values of which are the version."""
    values = np.full((4, size // 16), version, np.float32)
    return [("a", values), ("b", values[0, :3]), ("step", np.int64(version))]


def all_see(engines: dict[str, list[WeightsReader]], version: int, timeout_s: float = 60) -> None:
    """Waits until each engine has that version, and every value of it."""
    wait_until(
        lambda: all(seen(each) == version for readers in engines.values() for each in readers), timeout_s
    )


def seen(engine: WeightsReader) -> int:
    """The newest version, if all its values say it; -1 before the first."""
    if engine.version is None:
        return -1
    with engine.lease(timeout_s=20) as lease:
        assert all(np.all(tensor == lease.version) for tensor in lease.tensors.values())
        return lease.version


@pytest.fixture
def bridge(shared) -> str:
    """One for all tests here: each goes on with the versions after those of the test before."""
    return shared.bridge


@pytest.fixture
def there(shared) -> Callable[[str], str]:
    return shared.there


@pytest.fixture
def writer(bridge) -> Iterator[WeightsWriter]:
    with WeightsWriter(bridge) as writer:
        yield writer


@pytest.fixture
def first(writer) -> int:
    """The version that comes next."""
    return 0 if writer.last_version is None else writer.last_version + 1


@pytest.fixture
def engines(there) -> Iterator[dict[str, list[WeightsReader]]]:
    """Two engines on each node, which read its weights."""
    made = {node: [WeightsReader(there(node)) for _ in range(2)] for node in NODES}
    yield made
    for readers in made.values():
        for reader in readers:
            reader.close()


class Weights:
    """What the relay of a bridge says of weights, and its actors."""

    def __init__(self, cluster, relay) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        self._cluster, self._relay = cluster, relay

    def said(self) -> WeightsReport:
        import ray

        actor = ray.get_actor(sender_name(self._relay.bridge), namespace=NAMESPACE)
        return msgspec.msgpack.decode(ray.get(actor.report.remote(), timeout=30), type=WeightsReport)

    def pid(self, node: str) -> int:
        """Of the process that writes weights on a node."""
        import ray

        name = receiver_name(msgspec.convert(self._relay.last["sources"][node], Placed))
        return self._pid(name, ray)

    def leave(self, node: str) -> None:
        """What writes weights on a node leaves its bridge, as before the first version."""
        import ray

        name = receiver_name(msgspec.convert(self._relay.last["sources"][node], Placed))
        ray.get(ray.get_actor(name, namespace=NAMESPACE).stop.remote(), timeout=30)

    def end_for_good(self, node: str) -> None:
        """What sends weights, and what writes them on a node; the command that would place them is away."""
        import ray

        self._relay.kill()
        placed = msgspec.convert(self._relay.last["sources"][node], Placed)
        for name in (sender_name(self._relay.bridge), receiver_name(placed), placed.actor):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))

    def begin_command(self) -> None:
        self._relay.begin()

    def outward_pid(self) -> int:
        import ray

        return self._pid(sender_name(self._relay.bridge), ray)

    def _pid(self, name: str, ray) -> int:
        actors = ray._private.state.state.actor_table(None)
        found = [each["Pid"] for each in actors.values() if (each["Name"], each["State"]) == (name, "ALIVE")]
        return found[0] if found else 0

    def in_object_stores(self) -> int:
        """Bytes of primary copies in the object stores of all nodes."""
        reply = get_memory_info_reply(get_state_from_address(self._cluster.address))
        return reply.store_stats.object_store_bytes_primary_copy


@pytest.fixture
def weights(cluster, shared) -> Weights:
    cluster.mend()
    return Weights(cluster, shared.relay.ready(*NODES))


def test_versions_come_to_every_node_once(writer, first, weights, engines, there, consumer):
    """However many engines read them; an environment hears of a version when it is whole on its node."""
    environments = [shmbridge.Producer(there(node), "gsm8k") for node in NODES]
    for version in range(first, first + 3):
        writer.publish(version, model(version))
        consumer.publish_policy_version(version)
        for environment, readers in zip(environments, engines.values(), strict=True):
            wait_until(partial(hears, environment, version), 60)
            assert [seen(each) for each in readers] == [version, version]
    last = first + 2
    wait_until(lambda: all(each.version == last for each in weights.said().nodes.values()), 30)
    for node in weights.said().nodes.values():
        assert (node.versions, node.replaced, node.error) == (3, 0, "")
        assert node.bytes <= 3 * (MIB + 4096)
    wait_until(lambda: weights.in_object_stores() == 0, 30)
    wait_until(lambda: report(writer.bridge).weights.nodes["env-2"].version == last, 30)
    shown = table(report(writer.bridge), None, 1.0).splitlines()
    assert [line.split()[-1] for line in shown[:4]] == ["weights", *[str(last)] * 3]
    for environment in environments:
        environment.close()


def hears(environment: shmbridge.Producer, version: int) -> bool:
    return environment.policy_version == version


def test_a_node_that_cannot_take_weights_says_why_and_holds_up_nobody(writer, first, weights, engines, there):
    weights.leave("env-2")
    with WeightsWriter(there("env-2")) as other:
        other.publish(first, model(first))
        writer.publish(first + 1, model(first + 1))
        all_see({"env-1": engines["env-1"]}, first + 1)
        wait_until(lambda: weights.said().nodes["env-2"].error, 30)
        assert weights.said().nodes["env-2"].error.startswith("[SB401] the weights of ")
        wait_until(lambda: "! env-2: weights: [SB401]" in table(report(writer.bridge), None, 1.0), 30)
        assert [seen(each) for each in engines["env-2"]] == [first, first]
    all_see(engines, first + 1)
    wait_until(lambda: weights.said().nodes["env-2"].error == "", 30)


def test_a_stopped_node_holds_up_nobody_and_gets_the_newest(writer, first, weights, engines):
    """Versions that it missed are not sent to it; the learner never waits."""
    writer.publish(first, model(first))
    all_see(engines, first)
    wait_until(lambda: all(each.version == first for each in weights.said().nodes.values()), 30)
    before = weights.said().nodes["env-2"].versions
    stopped, last = weights.pid("env-2"), first + 5
    os.kill(stopped, signal.SIGSTOP)
    try:
        for version in range(first + 1, last + 1):
            writer.publish(version, model(version), timeout_s=1)
            all_see({"env-1": engines["env-1"]}, version)
        assert seen(engines["env-2"][0]) == first
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: seen(engines["env-2"][0]) == last, 60)
    wait_until(lambda: weights.said().nodes["env-2"].version == last, 30)
    assert weights.said().nodes["env-2"].versions < before + 4
    wait_until(lambda: weights.in_object_stores() == 0, 30)


def test_a_learner_faster_than_the_network_gets_versions_out(writer, first, weights, engines):
    """Versions under way are replaced, but never for ever."""
    before = {name: said.versions + said.replaced for name, said in weights.said().nodes.items()}
    version, came, until = first, set(), time.monotonic() + 60
    while len(came) < 4:
        assert time.monotonic() < until, came
        writer.publish(version, model(version, LARGE // 2), timeout_s=20)
        came.add(seen(engines["env-1"][0]))
        version += 1
    all_see(engines, version - 1)
    wait_until(lambda: all(each.version == version - 1 for each in weights.said().nodes.values()), 30)
    for name, said in weights.said().nodes.items():
        assert said.versions + said.replaced - before[name] < version - first
        assert said.error == ""


def test_what_ended_for_good_comes_again_without_the_command(writer, first, weights, engines, there):
    """The destination looks after the others: Ray restarts only what was killed."""
    writer.publish(first, model(first))
    all_see(engines, first)
    weights.end_for_good("env-1")
    try:
        writer.publish(first + 1, model(first + 1))
        all_see(engines, first + 1, 30)
        with shmbridge.Producer(there("env-1"), "gsm8k") as producer:
            producer.put({"tokens": [[1, 2]], "score": [1.0]})
            wait_until(lambda: producer.held == 0, 20)
    finally:
        weights.begin_command()


def under_way(bridge: str) -> bool:
    """Whether a part of a version, and not all of it, is written there."""
    found = open_weights_segment(bridge)
    return found is not None and 0 < found.written.sum() < sum(each.nbytes for _, each in model(0, LARGE))


def test_kills_in_the_middle_leave_the_version_before(cluster, writer, first, weights, engines, there):
    """SIGKILL of what writes on a node, of what sends to it, of its raylet; versions come afterwards."""
    writer.publish(first, model(first, LARGE))
    all_see(engines, first)
    for version, victim in ((first + 1, weights.pid("env-1")), (first + 2, weights.outward_pid())):
        assert victim
        writer.publish(version, model(version, LARGE))
        wait_until(partial(under_way, there("env-1")), 60)
        os.kill(victim, signal.SIGKILL)
        assert seen(engines["env-1"][0]) in (version - 1, version)
        all_see(engines, version)
    wait_until(lambda: weights.in_object_stores() == 0, 30)
    cluster.kill_raylet("env-2")
    writer.publish(first + 3, model(first + 3, LARGE))
    all_see({"env-1": engines["env-1"]}, first + 3)
    assert [seen(each) for each in engines["env-2"]] == [first + 2, first + 2]
    cluster.add("env-2")
    all_see(engines, first + 3, 90)
