"""Episodes that are in no record: counted by their producer, and shown wherever a lane is."""

import json
import subprocess
import sys

import pytest

from shmbridge.errors import BadArgument


def shown(*words):
    """What a command prints."""
    command = [sys.executable, "-m", "shmbridge", *words]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout


def test_lost_episodes_are_counted_by_reason_wherever_a_lane_is_shown(bridge, make_producer, make_consumer):
    consumer = make_consumer()
    for env_name, lost in (("math", {"failed": 3, "late": 1}), ("code", {"too_old": 8, "failed": 2})):
        producer = make_producer(env_name=env_name)
        for reason, episodes in lost.items():
            producer.count_lost(reason, episodes)
        stats = producer.stats()
        for reason in ("failed", "late", "too_old"):
            assert stats[f"episodes_lost_total{{{reason}}}"] == lost.get(reason, 0)
    said = shown("inspect", bridge)
    assert "episodes lost: 3 failed, 1 late" in said
    assert "episodes lost: 2 failed, 8 too old" in said
    look = json.loads(shown("top", bridge, "--json", "--once"))
    assert look["losses"]["episodes_lost"] == {"failed": 5, "late": 1, "too_old": 8}
    consumer.poll()
    counted = consumer.stats()
    assert counted["episodes_lost_total"] == 14
    assert counted["episodes_lost_total{failed}"] == 5


@pytest.mark.parametrize("wrong", [("tired", 1), ("late", -1)])
def test_another_reason_or_number_is_refused(make_producer, wrong):
    with pytest.raises(BadArgument):
        make_producer().count_lost(*wrong)
