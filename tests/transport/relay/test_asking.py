"""How much a destination asks for, and for how long it lets a source wait."""

from relaying import exchange, group

from shmbridge.relay.wire import MOST_BYTES

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
    assert destination.ask(NODE).max_bytes == MOST_BYTES
    destination.lost(NODE)
    assert destination.ask(NODE).max_bytes == LITTLE


def test_hundreds_of_nodes_are_asked_more_rarely(make_destination):
    destination = make_destination(wait_s=0.25)
    waits = [destination.ask(f"env-{number}").wait_s for number in range(500)]
    assert waits[0] == waits[100] == 0.25
    assert waits[-1] == 1.0
