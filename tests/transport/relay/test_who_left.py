"""What a destination keeps of nodes that left, and who may be one."""

import pytest
from relaying import exchange, group, take, taken

import shmbridge
from shmbridge.relay.destination import Destination


def test_nothing_is_kept_of_nodes_that_left(make_source, make_destination, put_there, consumer):
    """Their records stay known by lanes and receipts, which are read when they come again."""
    source, destination = make_source(), make_destination()
    producers = [put_there() for _ in range(8)]
    for number in range(3):
        for producer in producers:
            producer.put(group(number))
    exchange(source, destination)  # none is acknowledged
    assert len(taken(consumer)) == 24
    destination.gone(source.node)
    assert len(destination._here) == 0
    source.close()
    again = make_source()
    assert len(destination.request(again.node).committed) == 8
    destination.cancel(again.node)
    for producer in producers:
        producer.put(group(3))
    exchange(again, destination, 2)
    assert sorted(taken(consumer)) == sorted((producer.producer_id, 3) for producer in producers)
    exchange(again, destination)
    assert again.stats()["held"] == 0


def test_a_node_that_comes_again_under_another_name_repeats_nothing(
    make_source, make_destination, put_there, consumer
):
    source, destination, producer = make_source(), make_destination(), put_there()
    for number in range(3):
        producer.put(group(number))
    exchange(source, destination)
    destination.gone(source.node)
    source.close()
    again = make_source("another")
    producer.put(group(3))
    keys = take(consumer, 4, lambda: exchange(again, destination))
    assert keys == [(producer.producer_id, number) for number in range(4)]
    assert destination.stats()["duplicates_total"] == 3


def test_what_another_name_of_a_node_sent_is_acknowledged_to_it(
    make_source, make_destination, put_there, consumer
):
    """Also if it sent before the node was gone under its first name, and sends nothing afterwards."""
    source, destination, producer = make_source(), make_destination(), put_there()
    producer.put(group(0))
    exchange(source, destination)
    source.close()
    again = make_source("another")
    for number in (1, 2):
        producer.put(group(number))
    keys = take(consumer, 3, lambda: exchange(again, destination))
    destination.gone("env-1")
    exchange(again, destination, 2)
    assert keys == [(producer.producer_id, number) for number in range(3)]
    assert again.stats()["held"] == 0


def test_two_destinations_without_a_lane_exclude_each_other(bridge, make_destination):
    first = make_destination()
    with pytest.raises(shmbridge.RelayTaken, match="another process"):
        Destination(bridge)
    first.close()
    make_destination()
