"""Records of one source in several lanes here come in order, after any process has died."""

from relaying import exchange, group, take, taken


def test_two_lanes_of_one_source_come_one_after_the_other(
    make_source, make_destination, put_there, make_consumer
):
    """The destination dies, then the learner: all records of both relays' lanes are un-released."""
    first_learner, producer = make_consumer(), put_there()
    source, first = make_source(), make_destination()
    for number in range(10):
        producer.put(group(number))
    exchange(source, first)
    held = first_learner.poll()
    first.close()
    second = make_destination()
    for number in range(10, 20):
        producer.put(group(number))
    exchange(source, second, 2)
    held += first_learner.poll()
    assert len(held) == 20
    del held
    first_learner.close()
    second_learner = make_consumer()
    came = [second_learner.get(timeout_s=5) for _ in range(12)]
    came += take_while(second_learner)
    assert [each.meta.origin.sequence for each in came] == list(range(20))
    assert all(each.meta.redelivered for each in came)
    for record in came:
        record.release()
    assert taken(second_learner) == []
    producer.put(group(20))
    assert [sequence for _, sequence in take(second_learner, 1, lambda: exchange(source, second))] == [20]


def take_while(consumer) -> list:
    """All records that are there."""
    found = []
    while records := consumer.poll():
        found += records
    return found


def test_a_source_that_waits_behind_its_earlier_lane_delays_no_other(
    make_source, make_destination, put_there, make_consumer
):
    first_learner = make_consumer()
    both, other = put_there(), put_there(env_name="math")
    source, first = make_source(), make_destination()
    for number in range(3):
        both.put(group(number))
    exchange(source, first)
    held = first_learner.poll()
    first.close()
    second = make_destination()
    both.put(group(3))
    other.put(group(0))
    exchange(source, second, 2)
    held += first_learner.poll()
    assert len(held) == 5
    del held
    first_learner.close()
    second_learner = make_consumer()
    keys = []
    for _ in range(5):
        with second_learner.get(timeout_s=5) as record:
            keys.append((record.meta.env_name, record.meta.origin.sequence))
    assert keys.index(("math", 0)) < 3
    assert [sequence for name, sequence in keys if name == "gsm8k"] == [0, 1, 2, 3]
