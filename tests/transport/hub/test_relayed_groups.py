"""Groups are assembled by the producer that put them on another node, whichever relay brings fragments."""

import os

import pytest

import shmbridge
from shmbridge.put import LaneOrigin, RelayedRecord
from shmbridge.record import memory_of, table_of


@pytest.fixture(scope="module")
def fragments() -> list[tuple]:
    """The halves of a group of two rows, and a whole group, as they are sent."""
    name = f"t-groups-{os.getpid()}"
    with shmbridge.Producer(name, lane_bytes="64K") as producer, shmbridge.Consumer(name) as consumer:
        made = []
        for number in range(3):
            size = 2 if number < 2 else 1
            producer.put(
                {"tokens": [[number]], "loss_mask": [[1]]}, group_id=f"g{number // 2}", group_size=size
            )
            with consumer.get(timeout_s=5) as record:
                memory = memory_of(record)
                made.append((bytes(memory.memory), table_of(record), memory.words, -1, -1))
        return made


@pytest.fixture
def relay(make_producer, fragments):
    def make(*numbers: int, source: str = "source", newest: int | None = None) -> shmbridge.Producer:
        producer = make_producer(origin=LaneOrigin("env-2", source, newest))
        for number in numbers:
            producer.put(RelayedRecord(*fragments[number], number, 0, 0))
        return producer

    return make


def tokens(batch) -> list[int]:
    found = sorted(batch.tokens.tolist())
    batch.release()
    return found


def discarded(consumer) -> int:
    return consumer.stats()["discarded_total{partial}"]


def test_a_group_comes_together_over_two_lanes_of_one_source(relay, make_consumer, until) -> None:
    """The relay has died in its middle, and the next one brings the rest. Of a source that sends nothing
    again the fragment is discarded at once.
    """
    consumer = make_consumer(group_timeout_s=60)
    batches = consumer.batches(groups=1, layout="packed", prefetch=1)
    relay(0).close()
    ended = relay(0, source="ended")
    ended.close_origin()
    ended.close()
    relay(2, source="other")
    assert tokens(next(batches)) == [2]
    until(lambda: discarded(consumer) == 1)
    relay(1, newest=0)
    assert tokens(next(batches)) == [0, 1]
    assert (discarded(consumer), consumer.stats()["discarded_total"]) == (1, 1)
    batches.close()


def test_fragments_of_two_sources_are_two_groups(relay, make_consumer) -> None:
    consumer = make_consumer(group_timeout_s=60)
    batches = consumer.batches(groups=1, layout="packed", prefetch=0)
    relay(0)
    relay(1, source="other")
    relay(2, source="third")
    assert tokens(next(batches)) == [2]
    assert consumer.stats()["held"] == 2


def test_a_partial_group_whose_relay_never_comes_back_is_discarded_after_its_deadline(
    relay, make_consumer, until
) -> None:
    consumer = make_consumer(group_timeout_s=0.05)
    batches = consumer.batches(groups=1, layout="packed", prefetch=1)
    relay(0).close()
    relay(2, source="other")
    assert tokens(next(batches)) == [2]
    until(lambda: discarded(consumer) == 1)
    batches.close()
