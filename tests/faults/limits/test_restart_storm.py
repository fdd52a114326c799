"""Producers that die and come again, many more than lanes: all is delivered in bounded memory; without a
consumer the mount fills.
"""

import shmbridge
from shmbridge.segments import lane_names

COUNT, LANES = 200, 8


def test_a_storm_with_a_consumer(start, bridge, segments, until) -> None:
    """Once the consumer has taken their records, no more than a few dead lanes are ever left."""
    consumer = shmbridge.Consumer(bridge, lanes=LANES)
    child = start("storm", COUNT)
    numbers, most = [], 0
    while len(numbers) < COUNT:
        with consumer.get(20) as record:
            numbers.append(int(record["tokens"].values[0]))
            del record
        most = max(most, len(lane_names(bridge)))
    assert child.step("storm")["died"] == COUNT
    assert child.rest() == []
    assert sorted(numbers) == list(range(COUNT))
    until(lambda: not lane_names(bridge), 2.0)
    assert most < COUNT / 2, f"{most} lanes stood at a time"
    assert consumer.stats()["records_total"] == consumer.stats()["released_total"] == COUNT
    consumer.close()
    assert segments() == []


def test_a_storm_before_the_consumer(start, bridge, segments, until) -> None:
    """More dead lanes than it takes from at once: the oldest first, and all in the end."""
    count = COUNT // 4
    assert start("storm", count).rest()[-1] == {"step": "storm", "died": count, "lanes": count}
    with shmbridge.Consumer(bridge, lanes=LANES) as consumer:
        assert len(consumer._lanes) == LANES
        numbers = []
        while len(numbers) < count:
            with consumer.get(20) as record:
                numbers.append(int(record["tokens"].values[0]))
                del record
        assert sorted(numbers) == list(range(count))
        assert max(numbers[:LANES]) < 2 * LANES, f"the oldest lanes come first: {numbers}"
        until(lambda: not lane_names(bridge), 2.0)
    assert segments() == []


def test_a_batch_of_more_groups_than_lanes_from_the_dead(start, bridge, segments, until) -> None:
    """Dead lanes whose records wait in a half-filled batch must not keep out the lanes that would fill it."""
    start("storm", 3 * LANES).rest()
    with shmbridge.Consumer(bridge, lanes=LANES) as consumer:
        iterator = consumer.batches(groups=3 * LANES, prefetch=0)
        batch = next(iterator)
        assert sorted(batch.tokens.tolist()) == list(range(3 * LANES))
        assert consumer.stats()["held"] == 3 * LANES
        batch.release()
        iterator.close()
        until(lambda: not lane_names(bridge), 2.0)
    assert segments() == []


def test_a_storm_without_a_consumer_fills_the_mount(in_shm) -> None:
    said = in_shm("mount -t tmpfs -o size=8m tmpfs /dev/shm", "storm_then_consume", "256K")
    full, storm, found, again, end = said
    assert full["step"] == "full"
    assert "free of 8 MiB" in full["message"]
    assert full["hint"]
    died = storm["died"]
    assert died == storm["lanes"] == full["number"] > 20, "the one that failed left nothing"
    assert found["numbers"] == list(range(died))
    assert again["error"] is None, "there is room again"
    assert end["names"] == []
