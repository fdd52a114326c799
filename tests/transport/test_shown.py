"""What a user sees of public objects: names, reprs with their state, step counts."""

import asyncio
import dataclasses

import numpy as np
import pytest

import shmbridge
from shmbridge.record import Ragged, RaggedLists, RecordMeta
from shmbridge.weights import WeightsReader, WeightsWriter

GROUP = {
    "tokens": [[1, 2, 3], [4, 5]],
    "distill_token_ids": [[[1], [2], [3]], [[4], [5]]],
    "prompt_length": [0, 0],
}

# Every public name; a change of this list is a change of the interface.
SURFACE = {
    shmbridge.Consumer: """announce_run batches close current_step drain draining end_run get get_async
        hub_epoch note_training_version one_wait pause paused policy_version poll publish_policy_version
        put_back queue resume run screen serve_ranks stats step_done take_back_dropped take_evaluations
        take_groups training_version""",
    shmbridge.Producer: """begin_group begin_group_async claim close close_origin count_lost free_bytes held
        leave_receipt paused
        policy_version producer_id put put_async put_many removed stats""",
    shmbridge.Rank: """batches close gather next_share note_crashes one_wait report_done report_failed stats
        take_back_dropped""",
    shmbridge.Ticket: "end show",
    shmbridge.Run: """batch_size checkpoint_dir max_token_len num_steps save_checkpoint_interval starting_step
        wandb_group wandb_project""",
}
RECORD = """columns is_released items json keys meta release row_checks rows tag to_arrow to_polars
    to_scored_data token_count valid"""


def public(names):
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("cls", SURFACE, ids=lambda cls: cls.__name__)
def test_the_public_surface(cls):
    assert public(vars(cls)) | {each for base in cls.__mro__[1:-1] for each in public(vars(base))} == set(
        SURFACE[cls].split()
    )


def test_the_public_surface_of_records(producer, consumer):
    from shmbridge.schema import STANDARD

    producer.put(GROUP)
    record = consumer.get(5)
    moved = {field.name for field in dataclasses.fields(RecordMeta)}  # names that warn, for one release
    assert public(dir(record)) == {*RECORD.split(), *STANDARD, *moved}
    assert not [name for name in ("slot", "reader", "abandon", "lane_memory") if hasattr(record, name)]


@pytest.mark.parametrize(
    "cls", [*SURFACE, shmbridge.Batch, shmbridge.Record, Ragged, RaggedLists], ids=lambda cls: cls.__name__
)
def test_every_public_name_has_a_docstring(cls):
    noted = cls.__doc__ or ""
    silent = [
        name
        for name in public(dir(cls))
        if not getattr(getattr(cls, name), "__doc__", None) and name not in noted
    ]
    assert silent == []


@pytest.mark.parametrize("cls", [shmbridge.Batch, shmbridge.Consumer, shmbridge.Producer, shmbridge.Rank])
def test_every_public_attribute_of_an_object_is_described(cls, producer, consumer, make_rank):
    producer.put(GROUP)
    objects = {shmbridge.Producer: producer, shmbridge.Consumer: consumer}
    if cls is shmbridge.Batch:
        objects[cls] = next(consumer.batches(groups=1, timeout_s=5))
    elif cls is shmbridge.Rank:
        objects[cls] = make_rank()
    found = public(vars(objects[cls]))
    attributes = cls.__doc__.partition("Attributes:")[2]
    assert {
        name for name in found if f" {name}:" not in attributes and f" {name}," not in attributes
    } == set()


def test_every_field_of_meta_is_described(producer, consumer):
    producer.put(GROUP)
    for field in dataclasses.fields(consumer.get(5).meta):
        assert field.name in RecordMeta.__doc__


def bare(shown: object) -> bool:
    return " object at 0x" in repr(shown)


def test_reprs_say_the_state(bridge, make_producer, make_consumer, make_rank, segments):
    producer, consumer = make_producer(), make_consumer()
    assert "closed" not in repr(producer) + repr(consumer)
    with producer.claim(1, {"tokens": [2]}) as slot:
        slot["tokens"][:] = 1
        assert "open" in repr(slot)
    assert "committed as 0" in repr(slot)
    with producer.begin_group(5) as ticket:
        assert "held" in repr(ticket)
        producer.put(GROUP)
    assert "ended" in repr(ticket)
    assert "2 groups queued" in repr(consumer)
    first, second = consumer.poll()
    assert not bare(second["distill_token_ids"])
    assert "2 rows, 5 lists, 5 values" in repr(second["distill_token_ids"])
    assert "released" not in repr(first)
    first.release()
    assert "released" in repr(first)
    second.release()
    producer.put_many([GROUP] * 2)
    (group,) = consumer.take_groups(groups=1, timeout_s=5)
    assert "2/2 rows, 5 tokens" in repr(group)
    for record in group.records:
        record.release()
    consumer.pause()
    assert "pausing" in repr(consumer)
    consumer.resume()
    server = consumer.serve_ranks(1, groups=1)
    rank = make_rank()
    with rank.next_share(10) as share:
        assert "1 groups, 1 records" in repr(share)
    assert "released" in repr(share)
    for each in (consumer.columns, server, rank, share, group, ticket, slot, consumer.run, consumer.queue):
        assert not bare(each), each
    assert "1 ranks" in repr(server)
    rank.close()
    producer.close()
    consumer.close()
    assert "closed" in repr(producer)
    assert "closed" in repr(consumer)
    assert "closed" in repr(rank)
    assert "closed" in repr(server)
    for each in (consumer, producer, rank, server):
        dir(each)


def test_reprs_of_weights(bridge):
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        assert "no version yet" in repr(writer)
        writer.publish(3, [("a", np.zeros(4, np.float32))])
        assert "version 3" in repr(writer)
        with reader.lease() as lease:
            assert repr(lease) == "<WeightsLease of version 3: 1 tensors, 16 bytes>"
        assert "version 3" in repr(reader)
    assert "closed" in repr(writer)
    assert "closed" in repr(reader)


def test_steps_of_a_loop_over_records(producer, make_consumer):
    consumer = make_consumer(run=shmbridge.Run(starting_step=7))
    producer.put_many([GROUP] * 2)
    for record in consumer.poll():
        record.release()
    assert consumer.current_step == 7
    consumer.step_done()
    consumer.step_done()
    assert consumer.current_step == 9
    assert consumer.stats()["batches_total"] == 2
    consumer.close()
    with pytest.raises(shmbridge.Closed):
        consumer.step_done()


def test_async_with_producer(bridge, make_consumer):
    async def puts() -> shmbridge.Producer:
        async with shmbridge.Producer(bridge, lane_bytes="64K") as producer:
            await producer.put_async(GROUP)
        return producer

    producer = asyncio.run(puts())
    assert "closed" in repr(producer)
    assert len(make_consumer().poll()) == 1
