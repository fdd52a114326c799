"""A lane here that the hub will not read: its source hears of it, and all others go on."""

import logging

import pyarrow as pa
import pytest
from relaying import balanced, exchange, group, take, taken

import shmbridge
from shmbridge.testing import wait_until

MINE = pa.schema([("mine", pa.list_(pa.float32()))])


@pytest.fixture
def disagreeing(make_producer, monkeypatch, consumer) -> shmbridge.Producer:
    """A producer here, whose column disagrees with that of lanes which open at the same time."""
    producer = make_producer(schema=pa.schema([("mine", pa.list_(pa.int32()))]))
    producer.put(group(0))
    consumer.poll()[0].release()
    monkeypatch.setattr("shmbridge.producer.check_agrees_with_bridge", lambda *_: None)
    return producer


def test_its_source_goes_on_and_says_why(
    disagreeing, make_source, make_destination, put_there, consumer, caplog
):
    source, destination = make_source(), make_destination()
    refused, other = put_there(schema=MINE), put_there(env_name="math")
    refused.put({**group(0), "mine": [[1.0], [2.0]]})
    exchange(source, destination)
    with caplog.at_level(logging.ERROR):
        wait_until(lambda: consumer.poll() or destination.work() or destination.refusals(), 5)
    refused_in_lane = 1
    for number in range(1, 40):
        refused.put({**group(number), "mine": [[1.0], [2.0]]})
        other.put(group(number))
        exchange(source, destination)
    assert len(take(consumer, 39, lambda: exchange(source, destination))) == 39
    exchange(source, destination)
    assert source.stats()["held"] == 0
    assert source.stats()["refused_total{SB417}"] == 40 - refused_in_lane
    assert destination.stats()["refused_total{SB417}"] == 40 - refused_in_lane
    assert balanced(source.stats())
    assert list(destination.refusals()) == [f"{refused.producer_id} on env-1"]
    assert "column 'mine'" in destination.refusals()[f"{refused.producer_id} on env-1"]
    assert caplog.text.count(f"records of {refused.producer_id} on env-1 are refused: [SB417]") == 1


def test_another_destination_hears_of_it_too(disagreeing, make_source, make_destination, put_there, consumer):
    """The earlier lane has records that the hub will never take: a later one would wait for it."""
    source, first = make_source(), make_destination()
    refused = put_there(schema=MINE)
    for number in range(3):
        refused.put({**group(number), "mine": [[1.0], [2.0]]})
    exchange(source, first, 2)
    assert consumer.poll() == []
    first.close()
    second = make_destination()
    refused.put({**group(3), "mine": [[1.0], [2.0]]})
    wait_until(lambda: (exchange(source, second), source.stats().get("refused_total{SB417}"))[1] == 1, 5)
    assert second.stats()["waiting"] == 0
    assert source.stats()["held"] == 0


def test_the_next_hub_may_read_it(
    disagreeing, make_source, make_destination, put_there, consumer, make_consumer
):
    source, destination = make_source(), make_destination()
    refused = put_there(schema=MINE)
    refused.put({**group(0), "mine": [[1.0], [2.0]]})
    exchange(source, destination)
    wait_until(lambda: consumer.poll() or destination.work() or destination.refusals(), 5)
    disagreeing.close()
    consumer.close()
    another = make_consumer()
    wait_until(lambda: not (destination.work() or destination._lanes[refused.producer_id].unread), 5)
    refused.put({**group(1), "mine": [[1.0], [2.0]]})
    assert take(another, 2, lambda: exchange(source, destination)) == [
        (refused.producer_id, number) for number in range(2)
    ]
    assert destination.refusals() == {}
    assert taken(another) == []
