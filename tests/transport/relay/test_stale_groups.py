"""Staleness at the source decides for whole groups: no part of a group waits at the learner for the rest."""

import pytest
from relaying import balanced, exchange, group

from shmbridge.relay import source as source_lane


def put(producer, group_id: str, *versions: int, size: int | None = None) -> None:
    """A group of two rows a record, a record for each version."""
    for version in versions:
        producer.put(
            group(version), group_id=group_id, group_size=size or 2 * len(versions), policy_version=version
        )


def whole(consumer) -> list[list[int]]:
    """The groups that are whole, each as the versions of its records; releases them."""
    found = []
    while groups := consumer.take_groups(groups=1):
        for each in groups:
            found.append([record.meta.min_policy_version for record in each.records])
            for record in each.records:
                record.release()
    return found


def settled(source, destination, consumer) -> bool:
    """Whether nothing is left anywhere: no partial group waits, and each record is counted once."""
    exchange(source, destination, 2)
    return source.stats()["held"] == 0 and consumer.stats()["held"] == 0 and balanced(source.stats())


@pytest.fixture
def relays(make_source, make_destination, consumer):
    """A source and a destination that discard what is more than a version old; the version is 3."""
    consumer.publish_policy_version(3)
    source, destination = make_source(), make_destination(max_staleness=1)
    exchange(source, destination)
    return source, destination


def test_one_stale_record_takes_its_group_with_it(relays, put_there, consumer):
    source, destination = relays
    producer = put_there()
    put(producer, "old", 3, 1, 3)
    put(producer, "new", 3, 2)
    exchange(source, destination, 2)
    assert whole(consumer) == [[3, 2]]
    assert source.stats()["discarded_total{stale}"] == 3
    assert settled(source, destination, consumer)


def test_what_comes_after_a_discarded_record_is_discarded(relays, put_there, consumer):
    source, destination = relays
    producer = put_there()
    put(producer, "old", 1, size=6)
    exchange(source, destination)
    put(producer, "old", 3, 3, size=6)
    exchange(source, destination)
    put(producer, "old", 3, 3)  # the same id again, of another group
    exchange(source, destination, 2)
    assert whole(consumer) == [[3, 3]]
    assert source.stats()["discarded_total{stale}"] == 3
    assert settled(source, destination, consumer)


def test_what_comes_after_a_relayed_record_is_relayed(relays, put_there, consumer):
    """The learner then decides about the whole group."""
    source, destination = relays
    producer = put_there()
    put(producer, "begun", 2, size=6)
    exchange(source, destination)
    consumer.publish_policy_version(9)
    put(producer, "begun", 2, 2, size=6)
    put(producer, "later", 2, 2)
    exchange(source, destination, 2)
    assert whole(consumer) == [[2, 2, 2]]
    assert source.stats()["discarded_total{stale}"] == 2
    assert settled(source, destination, consumer)


def test_a_source_that_begins_in_a_group_relays_the_rest(relays, put_there, consumer, make_source):
    source, destination = relays
    producer = put_there()
    put(producer, "begun", 2, size=6)
    exchange(source, destination, 2)  # acknowledged
    source.close()
    consumer.publish_policy_version(9)
    put(producer, "begun", 2, 2, size=6)
    another = make_source()
    exchange(another, destination, 2)
    assert whole(consumer) == [[2, 2, 2]]
    assert settled(another, destination, consumer)


def test_groups_that_are_never_whole_are_not_kept_for_ever(relays, put_there, consumer, monkeypatch):
    source, destination = relays
    monkeypatch.setattr(source_lane, "_MOST_PARTIAL", 10)
    producer = put_there()
    for number in range(50):
        put(producer, f"group {number}", 3, size=4)
        exchange(source, destination, 2)
    assert len(source._lanes[producer.producer_id]._partial) <= 11
