"""How much a destination asks for, and for how long it lets a source wait."""

import threading
import time

import msgspec
import numpy as np
from relaying import exchange, group, send

from shmbridge.relay.wire import MOST_BYTES
from shmbridge.testing import wait_until
from shmbridge.weights import WeightsWriter

NODE = "env-1"
LITTLE = 64 << 10


def test_a_node_that_brought_nothing_is_asked_for_little(make_source, make_destination, put_there, consumer):
    source, destination = make_source(), make_destination()
    producer = put_there()
    assert exchange(source, destination) == 0
    for number in range(20):
        producer.put(group(number, tokens=1000))
    first = exchange(source, destination)
    assert 0 < first <= LITTLE
    rest = exchange(source, destination)
    assert rest > LITTLE
    assert destination.request(NODE).max_bytes == MOST_BYTES
    destination.cancel(NODE)
    assert destination.request(NODE).max_bytes == LITTLE


def test_hundreds_of_nodes_are_asked_more_rarely(make_destination):
    destination = make_destination(wait_s=0.25)
    waits = [destination.request(f"env-{number}").wait_s for number in range(500)]
    assert waits[0] == waits[100] == 0.25
    assert waits[-1] == 1.0


def test_a_node_that_has_nothing_is_asked_more_and_more_rarely(
    make_source, make_destination, put_there, consumer
):
    destination = make_destination(wait_s=0.004)
    source, producer = make_source(), put_there()
    waits = []
    for _ in range(6):
        ask = destination.request(NODE)
        waits.append(ask.wait_s)
        destination.accept(NODE, send(source, ask), time.monotonic_ns())
    assert waits == [0.004 * 2**number for number in range(6)]
    producer.put(group(0))
    assert exchange(source, destination) > 0
    assert destination.request(NODE).wait_s == 0.004


def waiting_pull(source, ask) -> tuple[threading.Thread, list]:
    """A pull that waits in a thread, and its parcel once it is over."""
    parcels = []
    thread = threading.Thread(target=lambda: parcels.append(source.pull(ask)))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    return thread, parcels


def test_a_first_record_ends_the_wait_of_a_source(make_source, make_destination, put_there):
    source, producer, destination = make_source(), put_there(), make_destination(wait_s=2.0)
    thread, parcels = waiting_pull(source, destination.request(NODE))
    put_s = time.monotonic()
    producer.put(group(0))
    thread.join(5)
    assert len(parcels[0].records) == 1
    assert time.monotonic() - put_s < 0.5


def test_news_of_the_learner_ends_the_wait_of_a_source(make_source, make_destination, put_there, consumer):
    """Once: the next ask says them."""
    source, producer, destination = make_source(), put_there(), make_destination(wait_s=2.0)
    ask = destination.request(NODE)
    thread, parcels = waiting_pull(source, ask)
    assert destination.to_notify() == {}
    consumer.publish_policy_version(1)
    assert destination.to_notify() == {NODE: (ask.session, ask.number)}
    assert destination.to_notify() == {}
    began_s = time.monotonic()
    source.notify(ask.session, ask.number)
    thread.join(5)
    assert time.monotonic() - began_s < 0.5
    destination.accept(NODE, parcels[0], time.monotonic_ns())
    thread, _ = waiting_pull(source, destination.request(NODE))  # the notify before was another ask's
    assert producer.policy_version == 1
    assert destination.to_notify() == {}
    source.notify("", -1)
    thread.join(5)
    assert not thread.is_alive()


def test_weights_that_become_whole_are_heard_of_while_a_source_waits(
    make_source, make_destination, put_there, consumer, elsewhere, bridge
):
    source, producer = make_source(), put_there()
    with WeightsWriter(bridge) as here, WeightsWriter(elsewhere) as there:
        destination = make_destination(wait_s=2.0, weights=True)
        here.publish(1, [("w", np.zeros(4))])
        consumer.publish_policy_version(1)
        thread, _ = waiting_pull(source, destination.request(NODE))
        assert producer.policy_version == -1
        there.publish(1, [("w", np.zeros(4))])
        wait_until(lambda: producer.policy_version == 1, 0.5)
        source.notify("", -1)
        thread.join(5)


def test_the_end_of_a_producer_ends_the_wait_of_a_source(make_source, make_destination, put_there, consumer):
    """Said once: what cannot be finished here yet does not make the source answer without end."""
    source, producer, destination = make_source(), put_there(), make_destination(wait_s=2.0)
    producer.put(group(0))
    exchange(source, destination, 2)
    ask = destination.request(NODE)
    thread, parcels = waiting_pull(source, ask)
    producer.close()
    thread.join(1.0)
    assert parcels[0].state.finished == [producer.producer_id]
    destination.accept(NODE, parcels[0], time.monotonic_ns())
    again = msgspec.structs.replace(destination.request(NODE), committed=ask.committed)
    thread, _ = waiting_pull(source, again)
    source.notify("", -1)
    thread.join(5)
