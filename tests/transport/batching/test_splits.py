"""Batches and ranks' shares are the train split unless asked; what is left out is released and counted."""

import pytest

import shmbridge

EVAL = {1, 2, 5, 8, 9}
TRAIN = sorted({*range(12)} - EVAL)


def put_all(producer: shmbridge.Producer, numbers=range(12)) -> None:
    for number in numbers:
        producer.put({"tokens": [[number], [number]]}, split="eval" if number in EVAL else "train")


def numbers_of(batches) -> list[int]:
    return sorted(int(batch.tokens[2 * at]) for batch in batches for at in range(batch.group_count))


def batches(consumer, make_rank, **asked) -> list[int]:
    return numbers_of(consumer.batches(groups=1, **asked))


def padded_batches(consumer, make_rank, **asked) -> list[int]:
    return sorted(
        int(b.tokens[0, 0]) for b in consumer.batches(groups=1, layout="padded", prefetch=0, **asked)
    )


def taken_groups(consumer, make_rank, **asked) -> list[int]:
    found = []
    while groups := consumer.take_groups(groups=1, **asked):
        for record in groups[0].records:
            found.append(int(record["tokens"].values[0]))
            record.release()
    return sorted(found)


def shares_of_ranks(consumer, make_rank, **asked) -> list[int]:
    server = consumer.serve_ranks(1, groups=1, **asked)
    found = numbers_of(make_rank(0, 1).batches(timeout_s=20))
    assert server.wait(5)
    return found


@pytest.mark.parametrize("door", [batches, padded_batches, taken_groups, shares_of_ranks])
@pytest.mark.parametrize("policy", ["fair", "oldest"])
@pytest.mark.parametrize(
    ("asked", "right"),
    [({}, TRAIN), ({"split": "eval"}, sorted(EVAL)), ({"split": None}, [*range(12)])],
    ids=["unasked", "eval", "both"],
)
def test_each_door_hands_out_one_split(make_producer, make_consumer, make_rank, door, policy, asked, right):
    consumer = make_consumer(policy=policy)
    put_all(make_producer())
    consumer.drain()
    assert door(consumer, make_rank, **asked) == right
    stats = consumer.stats()
    left = {"train": 0, "eval": 12 - len(right)}
    if asked == {"split": "eval"}:
        left = {"train": 12 - len(right), "eval": 0}
    assert {split: stats[f"left_out_total{{{split}}}"] for split in left} == left
    assert (stats["released_total"], stats["held"], stats["discarded_total"]) == (12, 0, 0)


def test_records_of_all_splits_come_one_by_one(producer, consumer) -> None:
    put_all(producer)
    with consumer.get(5) as first:
        splits = [first.meta.split]
    for record in consumer.poll():
        splits.append(record.meta.split)
        record.release()
    assert splits == ["eval" if number in EVAL else "train" for number in range(12)]


def test_a_lane_full_of_evaluations_does_not_block_training(make_producer, consumer) -> None:
    evaluations, training = make_producer(lane_bytes="64K"), make_producer(lane_bytes="64K")
    while True:
        try:
            evaluations.put({"tokens": [[1] * 512]}, split="eval", timeout_s=0)
        except shmbridge.LaneFull:
            break
    training.put({"tokens": [[3]]})
    with next(consumer.batches(groups=1, timeout_s=20)) as batch:
        assert batch.tokens.tolist() == [3]
    evaluations.put({"tokens": [[1] * 512]}, split="eval", timeout_s=20)


def test_groups_queued_for_one_split_are_left_out_of_batches_of_the_other(producer, consumer) -> None:
    """Groups were queued when a wait for a larger batch ended, or were returned unread."""
    put_all(producer)
    with pytest.raises(shmbridge.ConsumerEmpty):
        next(consumer.batches(groups=100, split=None, timeout_s=0, prefetch=0))
    groups = consumer.take_groups(groups=3, split=None)
    assert groups is not None
    assert [group.split for group in groups] == ["train", "eval", "eval"]
    with next(consumer.batches(groups=1, prefetch=0)) as batch:
        assert numbers_of([batch]) == [3]
    consumer.put_back(groups)
    with next(consumer.batches(groups=6, prefetch=0)) as batch:
        assert numbers_of([batch]) == [number for number in TRAIN if number != 3]
    assert consumer.stats()["left_out_total{eval}"] == len(EVAL)


def test_fragments_of_two_splits_are_no_group(producer, consumer, caplog) -> None:
    producer.put({"tokens": [[1]]}, group_id="torn", group_size=2)
    producer.put({"tokens": [[2]]}, group_id="torn", group_size=2, split="eval")
    producer.put({"tokens": [[3]]})
    with next(consumer.batches(groups=1, prefetch=0)) as batch:
        assert batch.tokens.tolist() == [3]
    assert "one fragment says split='train', another 'eval'" in caplog.text
    assert consumer.stats()["discarded_total{partial}"] == 2


@pytest.mark.parametrize("door", ["batches", "take_groups", "serve_ranks"])
def test_a_split_that_is_none_is_named(consumer, door) -> None:
    with pytest.raises(shmbridge.BadArgument, match="split='evaluation' is none of"):
        if door == "serve_ranks":
            consumer.serve_ranks(1, split="evaluation")
        else:
            getattr(consumer, door)(groups=1, split="evaluation")
