"""The calculator against real lanes: the bytes of a record, the size of a lane for a batch, and the errors
that quote it.
"""

import random
import re
import threading

import numpy as np
import pytest

import shmbridge
from shmbridge import sizing
from shmbridge.config import parse_size

RNG = np.random.default_rng(4)


def dense(lengths) -> dict:
    """A group of the dense core."""
    rows = [RNG.integers(0, 1000, length, dtype=np.int32) for length in lengths]
    floats = [row.astype(np.float32) for row in rows]
    mask = [np.ones(len(row), np.uint8) for row in rows]
    return {
        "tokens": rows,
        "loss_mask": mask,
        "inference_logprobs": floats,
        "advantages": floats,
        "token_rewards": floats,
    }


GROUPS = {
    "dense core": (lambda: dense([2048] * 8), {"tokens": 2048, "rows": 8}),
    "dense core, ragged": (lambda: dense([1, 17, 300]), {"tokens": [1, 17, 300]}),
    "tokens alone": (lambda: {"tokens": [[1, 2, 3]]}, {"tokens": 3, "columns": ["tokens"]}),
    "scores": (
        lambda: {**dense([100] * 16), "score": [1.0] * 16, "finish_reason": [1] * 16, "is_last": [True] * 16},
        {"tokens": 100, "rows": 16, "columns": [*sizing.DENSE_CORE, "score", "finish_reason", "is_last"]},
    ),
    "step rewards": (
        lambda: {
            "tokens": [[1] * 50] * 4,
            "step_rewards": [[0.5] * 7] * 4,
            "step_ends": [list(range(7, 50, 7))[:7]] * 4,
        },
        {"tokens": 50, "rows": 4, "columns": {"tokens": None, "step_rewards": 7, "step_ends": 7}},
    ),
    "a teacher's top 8": (
        lambda: {
            "tokens": [[1] * 50] * 4,
            "distill_token_ids": [[[1] * 8] * 50] * 4,
            "distill_logprobs": [[[0.5] * 8] * 50] * 4,
        },
        {
            "tokens": 50,
            "rows": 4,
            "columns": {"tokens": None, "distill_token_ids": (50, 8), "distill_logprobs": (50, 8)},
        },
    ),
    "parts of the reward": (
        lambda: {"tokens": [[1] * 50] * 4, "reward_components": [{"abc": 1.0, "abd": 2.0}] * 4},
        {"tokens": 50, "rows": 4, "columns": {"tokens": None, "reward_components": (2, 3)}},
    ),
    "texts": (
        lambda: {
            "tokens": [[1] * 50] * 4,
            "messages": ['"' + "x" * 98 + '"'] * 4,
            "instance_id": ["x" * 36] * 4,
            "extra": "{}",
        },
        {
            "tokens": 50,
            "rows": 4,
            "columns": {"tokens": None, "messages": 100, "instance_id": 36, "extra": 2},
        },
    ),
}


@pytest.mark.parametrize("what", GROUPS)
@pytest.mark.parametrize("group_id", ["g", "x" * 64, "x" * 200])
def test_a_record_takes_what_the_calculator_says(what, group_id, make_producer) -> None:
    group, shape = GROUPS[what]
    producer = make_producer(lane_bytes="4M")
    producer.put(group(), group_id=group_id)
    wanted = sizing.record_bytes(**shape, group_id_bytes=max(len(group_id), 64))
    assert producer.stats()["bytes_total"] == wanted
    if len(group_id) <= 64:
        assert sizing.record_bytes(**shape) == wanted


def test_records_of_random_shapes_take_what_the_calculator_says(make_producer) -> None:
    """Any columns, any lengths: 200 records, and the sum is right after each."""
    generator, producer, total = random.Random(17), make_producer(lane_bytes="8M"), 0
    for _ in range(200):
        lengths = [generator.randrange(0, 200) for _ in range(generator.randrange(1, 9))]
        names = ["tokens", *generator.sample(sizing.DENSE_CORE[1:], generator.randrange(0, 5))]
        group = dense(lengths)
        producer.put({name: group[name] for name in names})
        total += sizing.record_bytes(lengths, columns=names)
        assert producer.stats()["bytes_total"] == total, (lengths, names)


def test_columns_that_need_a_number_say_so() -> None:
    for columns, wanted in (
        ({"tokens": None, "messages": None}, "100"),
        (["tokens", "distill_logprobs"], r"\(100, 8\)"),
    ):
        with pytest.raises(ValueError, match=wanted):
            sizing.record_bytes(10, columns=columns)
    with pytest.raises(KeyError):
        sizing.record_bytes(10, columns=["nobody"])


@pytest.mark.parametrize("lane_bytes", ["64K", "100K", "512K", "1M", "1000K", "3M", "64M", "130M"])
def test_slots_and_segments_are_as_producers_make_them(lane_bytes, bridge) -> None:
    with shmbridge.Producer(bridge, lane_bytes=lane_bytes) as producer:
        assert sizing.slots_of(parse_size(lane_bytes)) == producer._writer.slot_count
        (lane,) = next(each for each in shmbridge.list_bridges() if each.name == bridge).lanes
        assert sizing.segment_bytes(parse_size(lane_bytes)) == lane.size_bytes


def put_and_take(producer, consumer, lengths) -> list[shmbridge.Record]:
    """Puts records and takes them, without release."""
    for length in lengths:
        producer.put({"tokens": [np.zeros(length, np.int32)]}, timeout_s=0)
    return consumer.poll()


@pytest.mark.parametrize(
    ("held", "length"), [(3, 20_000), (8, 5000), (17, 2000), (63, 100), (64, 100), (200, 100)]
)
def test_a_lane_for_records_of_one_size(held, length, bridge, make_consumer) -> None:
    """It holds them and has room for one more; half of it does not."""
    record = sizing.record_bytes(length, columns=["tokens"])
    lane = sizing.lane_bytes_holding(held, record, same_size=True)
    with shmbridge.Producer(bridge, lane_bytes=lane, on_full="raise") as producer:
        assert len(put_and_take(producer, make_consumer(), [length] * (held + 1))) == held + 1
        if lane > sizing.SMALLEST_LANE:
            assert lane - (1 << 20) < max((held + 1) * record, (held + 1) << 14), "not much more than needed"


@pytest.mark.parametrize("seed", range(8))
def test_a_lane_for_records_of_any_size(seed, bridge, make_consumer) -> None:
    """In whatever order records come and are released, while at most `held` are held there is room for one of
    the largest.
    """
    generator = random.Random(seed)
    held, longest = generator.randrange(2, 12), generator.randrange(2000, 20_000)
    record = sizing.record_bytes(longest, columns=["tokens"])
    consumer, kept = make_consumer(), []
    with shmbridge.Producer(
        bridge, lane_bytes=sizing.lane_bytes_holding(held, record), on_full="raise"
    ) as producer:
        for _ in range(300):
            if len(kept) == held:
                kept += put_and_take(producer, consumer, [longest])
                kept.pop().release()
                kept.pop(generator.randrange(len(kept))).release()
            kept += put_and_take(producer, consumer, [generator.randrange(1, longest + 1)])


def test_holding_more_than_any_lane_can() -> None:
    with pytest.raises(ValueError, match="8192 is the limit"):
        sizing.lane_bytes_for(4096, groups=5000)
    assert sizing.slots_of(sizing.lane_bytes_holding(8191, 64)) == 8192


@pytest.mark.parametrize(("prefetch", "how"), [(0, "step"), (1, "step"), (2, "step"), (1, "gather")])
@pytest.mark.parametrize("producers", [1, 3])
def test_batches_flow_in_lanes_of_that_size(prefetch, how, producers, bridge, make_consumer) -> None:
    """No producer waits for room: all records held at a time fit in the lanes, and one more in each."""
    groups, batches = 6, 1 + prefetch if how == "step" else max(prefetch, 1)
    record = sizing.record_bytes(2000, columns=["tokens"])
    lane = sizing.lane_bytes_for(record, groups, producers, prefetch=prefetch, hold=how)
    everybody = [shmbridge.Producer(bridge, lane_bytes=lane, on_full="raise") for _ in range(producers)]
    for number in range(batches * groups):
        everybody[number % producers].put({"tokens": [np.full(2000, number)]})
    consumer = make_consumer()
    iterator = consumer.batches(groups=groups, prefetch=prefetch, hold=how)
    first = next(iterator)
    assert len(first) == groups
    for producer in everybody:
        producer.put({"tokens": [np.zeros(2000, np.int32)]})  # beside all that is held
    del first
    iterator.close()
    for producer in everybody:
        producer.close()


def put_for_ever(producer, length):
    """A thread that puts as long as there is room, within the time of the test."""

    def put() -> None:
        try:
            while True:
                producer.put({"tokens": [np.zeros(length(), np.int32)]}, timeout_s=20)
        except shmbridge.ShmBridgeError:
            return

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    return thread


def batch_of(bridge, groups, lane_bytes, lengths, producers=1, fragments=1):
    """Asks for one batch while all producers put; returns the batch's groups, or the BatchTooBig."""
    with shmbridge.Consumer(bridge) as consumer:
        everybody = [shmbridge.Producer(bridge, lane_bytes=lane_bytes) for _ in range(producers)]
        threads = [put_for_ever(producer, lengths) for producer in everybody]
        try:
            return len(next(consumer.batches(groups=groups, prefetch=0)))
        except shmbridge.BatchTooBig as too_big:
            return too_big
        finally:
            consumer.drain()
            for thread in threads:
                thread.join(10)
            for producer in everybody:
                producer.close()


@pytest.mark.parametrize(("same", "producers"), [(True, 1), (True, 2), (False, 1)])
def test_lanes_of_the_size_in_the_error_hold_the_batch(same, producers, bridge) -> None:
    generator = random.Random(5)
    lengths = (lambda: 3000) if same else (lambda: generator.randrange(1000, 3001))
    too_big = batch_of(bridge, 40, "64K", lengths, producers)
    assert isinstance(too_big, shmbridge.BatchTooBig)
    lanes, living = {
        1: (r"1 lane of \d+ KiB in all holds", "its 1 living producer has"),
        2: (r"2 lanes of \d+ KiB in all hold", "their 2 living producers have"),
    }[producers]
    said = (
        rf"a batch of 40 groups cannot be filled: \d+ are complete, 0 in part; {lanes} \d+ records of "
        rf"at most 1\d(\.\d)? KiB, and {living} no room for 1\d(\.\d)? KiB more"
    )
    assert re.search(said if same else said.replace("room for 1", r"room for \d"), str(too_big))
    found = re.search(
        r"raise lane_bytes of the producers to at least (\d+[KM]) each \((\d+) records", too_big.hint
    )
    assert found is not None, too_big.hint
    assert int(found[2]) == 40 // producers
    shmbridge.clean(bridge, dry_run=False)
    assert batch_of(bridge, 40, found[1], lengths, producers) == 40


def test_a_group_in_more_fragments_than_the_lane_holds(bridge, make_consumer, make_producer) -> None:
    """The fragments of one group are all held until it is whole."""
    consumer, producer = make_consumer(), make_producer(on_full="raise")
    with pytest.raises(shmbridge.LaneFull):
        for _ in range(20):
            producer.put({"tokens": [np.zeros(2000, np.int32)]}, group_id="one", group_size=20)
    with pytest.raises(shmbridge.BatchTooBig, match=r"1 in part.*at least \d+K each \(20 records") as caught:
        next(consumer.batches(groups=1, prefetch=0))
    size = re.search(r"at least (\d+[KM])", caught.value.hint)
    assert size is not None
    with make_producer(lane_bytes=size[1], on_full="raise") as larger:
        for _ in range(20):
            larger.put({"tokens": [np.zeros(2000, np.int32)]}, group_id="two", group_size=20)


@pytest.mark.parametrize("length", [9000, 100_000, 3_000_000])
def test_a_record_too_big_says_which_lane_holds_it(length, bridge) -> None:
    group = {"tokens": [np.zeros(length, np.int32)]}
    with (
        shmbridge.Producer(bridge, lane_bytes="64K") as producer,
        pytest.raises(shmbridge.RecordTooBig) as caught,
    ):
        producer.put(group)
    one, eight = re.findall(r'"(\d+[KM])"', caught.value.hint)
    for size, count in ((one, 1), (eight, 8)):
        if parse_size(size) < 100 << 20:
            with shmbridge.Producer(bridge, lane_bytes=size, on_full="raise") as producer:
                for _ in range(count):
                    producer.put(group)
            shmbridge.clean(bridge, dry_run=False)


def test_as_option_gives_a_size_that_parses() -> None:
    for size in (65536, 70_001, 1 << 20, 12 << 20, (1 << 30) + 1):
        assert parse_size(sizing.as_option(size)) >= size
    assert (sizing.as_option(12 << 20), sizing.as_option(192 << 10)) == ("12M", "192K")


def test_the_mount_holds_all_lanes_to_the_page(bridge) -> None:
    """The bytes of all lanes of a bridge, to the page."""
    lane = parse_size("1M")
    made = [shmbridge.Producer(bridge, lane_bytes=lane) for _ in range(3)]
    found = [
        path.stat().st_blocks * 512 for path in shmbridge.segments.segment.MOUNT.glob(f"shmbridge.{bridge}.*")
    ]
    assert sum(found) == sizing.mount_bytes_for(lane, 3)
    for producer in made:
        producer.close()
