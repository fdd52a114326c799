"""The end-to-end run: groups come through whole and are counted, differing ones are refused, processes end
and leave nothing.
"""

import json
import os

import pytest

import shmbridge
from shmbridge.bench import trainer
from shmbridge.bench.atropos_http import group_of
from shmbridge.bench.flow import Flow
from shmbridge.bench.groups import ROWS, Shape
from shmbridge.bench.scaling import OneThread

LENGTH = 64


def ours() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"shmbridge.bench-{os.getpid()}-")]


@pytest.mark.parametrize("how", ["put", "put_async"])
@pytest.mark.parametrize("form", ["lists", "arrays", "row_arrays"])
def test_a_window_counts_what_arrives(how, form):
    with Flow(how, LENGTH, form, lane_bytes=1 << 20) as flow:
        flow.go(groups=5)
        said = flow.go(groups=20)
    assert said["groups"] == 20
    assert said["tokens_per_s"] == pytest.approx(20 * ROWS * LENGTH / said["seconds"])
    assert 0 < said["latency_ms"]["p50"] <= said["latency_ms"]["p99"]
    assert set(said["cpu_s_per_million_tokens"]) == {"environment", "trainer"}
    assert said["cpu_s_per_million_tokens"]["trainer"] > 0
    assert (flow.stalls["ticks"] > 0) <= (how == "put_async")
    assert not ours()


def test_no_more_groups_are_under_way_than_were_allowed():
    with Flow("put", LENGTH, window=2, lane_bytes=1 << 20) as flow:
        flow.go(groups=7)
        bridge = next(name for name in ours() if ".l." in name).split(".")[1]
        held = next(each for each in shmbridge.list_bridges() if each.name == bridge).lanes[0].records
        assert held <= 7 + 2


@pytest.mark.parametrize("who", ["trainer", "environment"])
def test_a_process_that_ends_is_said(who):
    with (
        pytest.raises(RuntimeError, match=f"the {who} of 'put' has ended"),
        Flow("put", LENGTH, lane_bytes=1 << 20) as flow,
    ):
        flow.go(groups=1)
        process = getattr(flow, f"_{who}")
        process.terminate()
        process.wait()
        flow.go(groups=1)
    assert not ours()
    assert not ours()


def test_groups_in_json_are_the_groups_that_were_sent():
    """Although they came as text, every value is the same bit for bit."""
    groups, sent = trainer.Groups(LENGTH), json.loads(json.dumps(group_of(LENGTH, "lists", 1)))
    total = sum(map(trainer.touch, trainer.as_arrays(sent)))
    groups._check(total)
    sent["masks"][3][-1] = -100
    with pytest.raises(trainer.Differs, match="was not sent"):
        groups._check(sum(map(trainer.touch, trainer.as_arrays(sent))))


def test_a_record_that_was_not_sent_is_refused(bridge):
    arrivals = trainer.Groups(LENGTH).from_bridge(bridge)
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        producer.put(group_of(LENGTH, "lists", 0))
        assert isinstance(next(arrivals), float)
        producer.put(group_of(LENGTH, "lists", 99))
        with pytest.raises(trainer.Differs):
            next(arrivals)


@pytest.mark.parametrize("lanes", [1, 3])
def test_one_thread_takes_what_it_puts(lanes):
    with OneThread(Shape(length=16), "lists", lanes, 1 << 20) as both:
        cost = both.turn(10)
        assert both.consumer.stats()["released_total"] == 10
        assert both.put(2 * lanes) > 0
        assert both.gather(2 * lanes, "padded") > 0
        assert both.consumer.stats()["held"] == 0
    assert cost.groups == 10
    assert cost.put_s > 0 < cost.take_s
    assert not ours()


def test_a_lane_holds_what_is_said_to_fit():
    with OneThread(Shape(length=256), "arrays", 1, 1 << 20) as both:
        both.put(both.fits)
        with pytest.raises(shmbridge.errors.LaneFull):
            both.put(2)
