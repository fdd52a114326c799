"""Environments on two nodes, the learner on a third, over a real Ray cluster; and kills of everybody."""

import os
import signal
import subprocess
import sys

import pytest

import shmbridge
from shmbridge.testing import wait_until


def stats_there(relay, node: str) -> dict[str, float]:
    """The counters of a node's bridge, from the lanes' own words, as its relay has them."""
    import ray

    actor = ray.get_actor(relay.last["sources"][node]["actor"], namespace="shmbridge")
    return ray.get(actor.stats.remote(), timeout=20)


def assert_conserved(stats: dict[str, float]) -> None:
    discarded = sum(count for name, count in stats.items() if name.startswith("discarded_total{"))
    assert stats["records_total"] == stats["released_total"] + stats["held"] + discarded, stats


def test_all_groups_arrive_once_and_in_order(
    cluster, bridge, there, make_relay, make_environment, learner, tmp_path
):
    relay = make_relay()
    learner.consumer.publish_policy_version(3)
    environments = [
        make_environment(node, name, 100) for node in ("env-1", "env-2") for name in ("gsm8k", "math")
    ]
    learner.take(400)
    learner.nothing_more()
    for environment in environments:
        assert learner.came[environment.producer_id] == list(range(100))
        assert environment.done()[0] == 100
    info = next(each for each in shmbridge.list_bridges() if each.name == bridge)
    assert {lane.origin_node for lane in info.lanes} == {"env-1", "env-2"}
    relay.wait(lambda: relay.last["stats"]["relayed_total"] == 400)
    assert relay.last["stats"]["duplicates_total"] == 0

    relay.kill()  # its actors go on
    late = make_environment("env-2", "late", 50)
    learner.take(450)
    assert late.done() == (50, 3)  # the version was there before
    relay.begin()  # finds them
    relay.wait(lambda: relay.last["stats"]["relayed_total"] == 450)

    top = [sys.executable, "-m", "shmbridge", "top", bridge, "--cluster", "--once"]
    words = [*top, "--address", cluster.address]
    shown = subprocess.run(words, check=True, capture_output=True, text=True)
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert [" ".join(line[:2]) for line in lines[1:4]] == ["learner learner", "env-1 source", "env-2 source"]
    assert [line[lines[0].index("relayed")] for line in lines[2:4]] == ["200", "250"]
    assert lines[4] == ["policy", "version", "3"]

    for environment in (*environments, late):
        environment.leave()
    wait_until(lambda: not next(each for each in shmbridge.list_bridges() if each.name == bridge).lanes, 20)
    for node in ("env-1", "env-2"):
        stats = stats_there(relay, node)
        assert_conserved(stats)
        assert stats["held"] == 0
    stats = learner.consumer.stats()
    assert_conserved(stats)
    assert (stats["records_total"], stats["held"]) == (450, 0)
    relay.kill()
    relay.begin()
    relay.wait(lambda: relay.last["pid"])
    end_for_good(f"shmbridge-destination-{bridge}")
    pid = relay.last["pid"]
    relay.wait(lambda: relay.last["pid"] != pid)  # another one was placed
    relay.kill()
    assert len(relay.stop_by_command()) == 7  # three of the learner's node, two of each other
    assert relay.stop_by_command() == []


def test_kills_of_relays_and_environments_lose_and_repeat_nothing(
    cluster, make_relay, make_environment, learner
):
    """SIGKILL of a source's actor, the destination's, the directory's, an environment, in the middle."""
    relay = make_relay("--no-weights")
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
    end_for_good(relay.last["sources"]["env-2"]["actor"])
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
    assert_conserved(stats_there(relay, "env-1"))
    assert_conserved(learner.consumer.stats())
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


def end_for_good(actor: str) -> None:
    """Ray does not restart it."""
    import ray

    ray.kill(ray.get_actor(actor, namespace="shmbridge"))


def directory_pid(relay) -> int:
    import ray

    actors = ray._private.state.state.actor_table(None)
    name = f"shmbridge-directory-{relay.bridge}"
    return next(each["Pid"] for each in actors.values() if each["Name"] == name and each["State"] == "ALIVE")


def test_a_killed_raylet_loses_only_what_was_never_relayed_and_says_how_much(
    cluster, bridge, there, make_relay, make_environment, learner
):
    """The node's environments go on, and when a raylet comes again, so do their records."""
    relay = make_relay("--no-weights")
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
    assert relay.last["stats"]["duplicates_total"] == 0
    assert_conserved(learner.consumer.stats())
    wait_until(lambda: records_of(there("env-2")) == 0)


def records_of(bridge: str) -> int:
    return sum(lane.held for each in shmbridge.list_bridges() if each.name == bridge for lane in each.lanes)


def test_a_learner_that_takes_nothing_makes_environments_elsewhere_wait(
    bridge, there, make_relay, make_environment, consumer
):
    """Memory is what the lanes have on both nodes, and one parcel."""
    relay = make_relay("--no-weights", "--lane-bytes", "256K")
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


def test_batches_of_whole_groups_none_of_them_stale(there, make_relay, make_environment, consumer):
    relay = make_relay("--no-weights", "--max-staleness", "1")
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
        stats = stats_there(relay, "env-2")
        assert_conserved(stats)
        assert stats["discarded_total{stale}"] == 2

    environments = [make_environment(node, node, 40) for node in ("env-1", "env-2")]
    keys = []
    batches = consumer.batches(groups=8, timeout_s=30)
    for _ in range(10):
        with next(batches) as batch:
            keys += {(meta.origin.producer_id, meta.origin.sequence) for meta in batch.meta}
    assert sorted(keys) == sorted((each.producer_id, n) for each in environments for n in range(40))
