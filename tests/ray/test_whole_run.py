"""Environments on two nodes, the learner on a third, over a real Ray cluster, from first to last."""

import subprocess
import sys

import shmbridge
from shmbridge.testing import wait_until


def test_all_groups_arrive_once_and_in_order(
    cluster, bridge, make_relay, make_environment, learner, conserved
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
        stats = relay.stats_there(node)
        conserved(stats)
        assert stats["held"] == 0
    stats = learner.consumer.stats()
    conserved(stats)
    assert (stats["records_total"], stats["held"]) == (450, 0)
    relay.kill()
    relay.begin()
    relay.wait(lambda: relay.last["pid"])
    relay.end_for_good(f"shmbridge-destination-{bridge}")
    pid = relay.last["pid"]
    relay.wait(lambda: relay.last["pid"] != pid)  # another one was placed
    relay.kill()
    assert len(relay.stop_by_command()) == 7  # three of the learner's node, two of each other
    assert relay.stop_by_command() == []
