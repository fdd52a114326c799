"""Over a real Ray cluster: kills of everybody, a learner that takes nothing, stale groups."""

import os
import signal
from collections.abc import Callable

import pytest

import shmbridge
from shmbridge.testing import wait_until

# Of the relay that the tests share.
FLAGS = ("--no-weights", "--lane-bytes", "256K", "--max-staleness", "1")


@pytest.fixture
def bridge(shared) -> str:
    return shared.bridge


@pytest.fixture
def there(shared) -> Callable[[str], str]:
    return shared.there


@pytest.fixture
def relay(cluster, shared):
    """That of the test before, once nothing is left of its environments."""
    cluster.mend()
    relay = shared.relay.ready("env-1", "env-2")
    wait_until(lambda: not any(lanes_of(relay.bridge + suffix) for suffix in ("", "n1", "n2")), 20)
    return relay


def lanes_of(bridge: str) -> list:
    return [lane for each in shmbridge.list_bridges() if each.name == bridge for lane in each.lanes]


def test_kills_of_relays_and_environments_lose_and_repeat_nothing(
    relay, make_environment, learner, conserved
):
    """SIGKILL of a source's actor, the destination's, the directory's, an environment, in the middle."""
    kept = [make_environment(node, "kept", 600, pace_s=0.01) for node in ("env-1", "env-2")]
    ended = make_environment("env-1", "ended", 100_000, pace_s=0.005)
    learner.take(100)

    pids = [int(relay.node("env-1")["pid"])]
    os.kill(pids[0], signal.SIGKILL)
    learner.take(learner.count + 200)
    relay.wait(lambda: int(relay.node("env-1").get("pid", pids[0])) != pids[0])

    pids.append(int(relay.last["pid"]))
    os.kill(pids[1], signal.SIGKILL)
    learner.take(learner.count + 200)
    relay.wait(lambda: int(relay.last["pid"]) != pids[1])
    relay.ready("env-1", "env-2")

    os.kill(directory_pid(relay), signal.SIGKILL)
    relay.end_for_good(relay.last["sources"]["env-2"]["actor"])
    os.kill(ended.process.pid, signal.SIGKILL)
    ended.process.wait()
    for environment in kept:
        while len(learner.came[environment.producer_id]) < 600:
            learner.take(learner.count + 1)
    took = learner.count
    wait_until(lambda: not take_what_is_there(learner) and records_there(relay, "env-1") == 0, 20)
    for environment in kept:
        assert learner.came[environment.producer_id] == list(range(600))
    last = learner.came[ended.producer_id]
    assert last == list(range(len(last)))
    assert took > 1200
    conserved(relay.stats_there("env-1"))
    conserved(learner.consumer.stats())
    assert learner.consumer.stats()["records_total"] == learner.count


def records_there(relay, node: str) -> int:
    """Un-released records on a node, over all lanes."""
    bridge = relay.last["sources"][node]["bridge"]
    there = [each for each in shmbridge.list_bridges() if each.name == bridge]
    return sum(lane.held for each in there for lane in each.lanes)


def take_what_is_there(learner) -> int:
    before = learner.count
    while records := learner.consumer.poll():
        for record in records:
            with record:
                learner.came[record.meta.origin.producer_id].append(record.meta.origin.sequence)
    return learner.count - before


def directory_pid(relay) -> int:
    import ray

    actors = ray._private.state.state.actor_table(None)
    name = f"shmbridge-directory-{relay.bridge}"
    return next(each["Pid"] for each in actors.values() if each["Name"] == name and each["State"] == "ALIVE")


def test_a_killed_raylet_loses_only_what_was_never_relayed_and_says_how_much(
    cluster, there, relay, make_environment, learner, conserved
):
    """The node's environments go on, and when a raylet comes again, so do their records."""
    duplicates = relay.last["stats"]["duplicates_total"]
    stays = make_environment("env-1", "stays", 300, pace_s=0.01)
    leaves = make_environment("env-2", "leaves", 300, pace_s=0.01, lane_bytes="8M")
    learner.take(100)
    cluster.kill_raylet("env-2")
    relay.wait(lambda: any(each["event"] == "gone" for each in relay.events))
    gone = next(each for each in relay.events if each["event"] == "gone")
    assert gone["node"] == "env-2"
    while len(learner.came[stays.producer_id]) < 300:
        learner.take(learner.count + 1)
    assert leaves.done()[0] == 300
    learner.nothing_more()
    relayed = len(learner.came[leaves.producer_id])
    assert learner.came[leaves.producer_id] == list(range(relayed))
    assert relayed < 300
    assert gone["never_relayed"] <= records_of(there("env-2"))  # its last word; more came after it

    cluster.add("env-2")
    learner.take(600)
    learner.nothing_more()
    assert learner.came[stays.producer_id] == learner.came[leaves.producer_id] == list(range(300))
    assert relay.last["stats"]["duplicates_total"] == duplicates
    conserved(learner.consumer.stats())
    wait_until(lambda: records_of(there("env-2")) == 0)


def records_of(bridge: str) -> int:
    return sum(lane.held for each in shmbridge.list_bridges() if each.name == bridge for lane in each.lanes)


def test_a_learner_that_takes_nothing_makes_environments_elsewhere_wait(
    bridge, there, relay, make_environment, consumer
):
    """Memory is what the lanes have on both nodes, and one parcel."""
    environment = make_environment("env-1", "greedy", 2000, tokens=1000, lane_bytes="1M")
    wait_until(lambda: waits(there("env-1")), 30)
    before = rss(int(relay.last["pid"])), records_of(there("env-1"))
    info = next(each for each in shmbridge.list_bridges() if each.name == bridge)
    assert sum(lane.size_bytes for lane in info.lanes) < 512 << 10
    assert relay.last["stats"]["waiting_bytes"] <= 256 << 10
    with pytest.raises(AssertionError, match="not within"):
        wait_until(lambda: records_of(there("env-1")) != before[1], 2.0)
    assert rss(int(relay.last["pid"])) < before[0] + (8 << 20)
    taken = 0
    while taken < 2000:
        with consumer.get(timeout_s=30) as record:
            assert record.meta.origin.sequence == taken
        taken += 1
    assert environment.done()[0] == 2000


def waits(bridge: str) -> bool:
    from shmbridge.watch.snapshot import look

    return any((lane.blocked_s or 0) > 1 for lane in look(bridge).lanes)


def rss(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_batches_of_whole_groups_none_of_them_stale(there, relay, make_environment, consumer, conserved):
    consumer.publish_policy_version(5)
    with shmbridge.Producer(there("env-2"), "gsm8k") as producer:
        wait_until(lambda: producer.policy_version == 5)
        for version in (5, 3, 4, 2):
            producer.put({"tokens": [[1, 2]], "score": [1.0]}, policy_version=version)
        for sequence in (0, 2):
            with consumer.get(timeout_s=20) as record:
                assert record.meta.origin.sequence == sequence
        relay.wait(lambda: relay.node("env-2").get("source_discarded_total{stale}") == 2)
        wait_until(lambda: producer.held == 0)
        stats = relay.stats_there("env-2")
        conserved(stats)
        assert stats["discarded_total{stale}"] == 2

    environments = [make_environment(node, node, 40) for node in ("env-1", "env-2")]
    keys = []
    batches = consumer.batches(groups=8, timeout_s=30)
    for _ in range(10):
        with next(batches) as batch:
            keys += {(meta.origin.producer_id, meta.origin.sequence) for meta in batch.meta}
    assert sorted(keys) == sorted((each.producer_id, n) for each in environments for n in range(40))
