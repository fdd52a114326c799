"""A learner dies over its batches: many producers wait, its un-released records come again in order, and no
producer is restarted.
"""

import pytest

import shmbridge
from shmbridge.errors import Discard
from shmbridge.testing.faults import Fault

PRODUCERS, COUNT, FULL = 8, 10, 4  # a lane has room for four records


@pytest.fixture
def producers(faulty):
    """Eight producers of ten records each, asleep on lanes that are full."""
    children = {f"p{number}": faulty("produce", f"p{number}", COUNT) for number in range(PRODUCERS)}
    for child in children.values():
        child.until(f"put {FULL - 1}")
    return children


def parse(line: str) -> list[tuple[str, int, bool]]:
    """(producer, sequence, redelivered) of each record of a batch, as a learner says it."""
    word, *records = line.split()
    assert word == "batch", line
    return [
        (who, int(sequence), marked == "True")
        for who, sequence, marked in (record.split("/") for record in records)
    ]


def take_batches(learner, count: int) -> list[list[tuple[str, int, bool]]]:
    """`count` batches; the last is still in the learner's hands, those before it are released under
    hold="step".
    """
    learner.until("ready")
    batches = []
    for turn in range(count):
        if turn:
            learner.tell()
        batches.append(parse(learner.line()))
    return batches


def sequences(batches, producer: str) -> list[int]:
    return [sequence for batch in batches for who, sequence, _ in batch if who == producer]


def finish(producers, consumer, segments, total: int, discarded: int = 0) -> None:
    """The same processes go on to their end; every record is accounted for."""
    for name, child in producers.items():
        assert child.end() == 0, f"{name} did not finish: {child.said[-3:]}"
    stats = consumer.stats()
    assert (stats["records_total"], stats["held"], stats["discarded_total"]) == (total, 0, discarded)
    assert stats["released_total"] == total - discarded
    consumer.close()
    assert segments() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_learner_is_killed_over_a_batch_and_three_times_in_the_takeover(
    prefetch, producers, actor, faulty, lane_words, make_consumer, take, segments
):
    learner = actor("learn", 3, "step", prefetch)
    batches = take_batches(learner, 4)
    learner.kill()
    assert not any(marked for batch in batches for *_, marked in batch), "nobody had them before"
    before = lane_words()
    for fault in (Fault("hub.locked"), Fault("hub.adopting", 5), Fault("hub.marked", 4)):
        faulty("consume", 99, 99, fault=fault).end_on_fault()
    after = lane_words()
    assert all(after[name].head >= before[name].head for name in producers)
    in_hand = batches[-1]
    assert all(sequence < after[name].head for name, sequence, _ in in_hand), (
        "the batch in hand was handed out"
    )

    consumer = make_consumer()
    released = {name: sequences(batches[:-1], name) for name in producers}
    taken = take(consumer, {name: COUNT - len(released[name]) for name in producers}, timeout_s=20)
    for name in producers:
        due = [
            (sequence, sequence < after[name].head)
            for sequence in range(COUNT)
            if sequence not in released[name]
        ]
        assert taken[name] == due, f"{name}: released were {released[name]}, head was {after[name].head}"
    finish(producers, consumer, segments, PRODUCERS * COUNT)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_gathered_batches_come_at_most_once(
    prefetch, producers, actor, lane_words, make_consumer, take, segments
):
    """hold="gather": batches handed to the dead learner never come again; prefetched ones do, marked."""
    learner = actor("learn", 4, "gather", prefetch)
    batches = take_batches(learner, 3)
    learner.kill()
    words = lane_words()
    given = {name: sequences(batches, name) for name in producers}
    consumer = make_consumer()
    taken = take(consumer, {name: COUNT - len(given[name]) for name in producers}, timeout_s=20)
    for name in producers:
        due = [
            (sequence, sequence < words[name].head)
            for sequence in range(COUNT)
            if sequence not in given[name]
        ]
        assert taken[name] == due, f"{name} had given {given[name]}, head was {words[name].head}"
    if prefetch == 0:
        assert not any(marked for records in taken.values() for _, marked in records), (
            "nothing was taken ahead"
        )
    finish(producers, consumer, segments, PRODUCERS * COUNT)


def test_discard_drops_what_was_left_lane_by_lane_and_the_producers_go_on(
    producers, actor, lane_words, make_consumer, take, segments, until
):
    learner = actor("learn", 3, "step", 1)
    batches = take_batches(learner, 4)
    learner.kill()
    # producers with room have filled it
    until(lambda: all(words.unreleased == FULL for words in lane_words().values()), 10.0)
    before = lane_words()
    released = {name: sequences(batches[:-1], name) for name in producers}
    assert {name: words.committed - len(released[name]) for name, words in before.items()} == dict.fromkeys(
        producers, FULL
    )

    consumer = make_consumer(resume="discard")
    after = lane_words()
    assert {name: words.discarded[Discard.RESUME] for name, words in after.items()} == dict.fromkeys(
        producers, FULL
    )
    assert all(sum(words.discarded) == FULL for words in after.values()), "for no other reason"
    taken = take(consumer, {name: COUNT - words.committed for name, words in before.items()}, timeout_s=20)
    for name, words in before.items():
        assert taken[name] == [(sequence, False) for sequence in range(words.committed, COUNT)]
    assert consumer.stats()["discarded_total{resume}"] == PRODUCERS * FULL
    finish(producers, consumer, segments, PRODUCERS * COUNT, discarded=PRODUCERS * FULL)


@pytest.mark.parametrize("end", ["dropped", "killed"])
@pytest.mark.parametrize("how", ["released", "held", "error"])
def test_views_of_a_consumer_that_has_closed_never_change(
    how, end, actor, make_producer, make_consumer, roles, take, segments
):
    """The views keep the hub lock, so no successor can start and release their records."""
    producer = make_producer(producer_id="p", on_full="raise")
    for sequence in range(FULL):
        producer.put(roles.pattern("p", sequence), group_id=sequence)
    child = actor("keep_a_view", how)
    child.until("closed")
    with pytest.raises(shmbridge.ConsumerTaken, match=str(child.pid)):
        make_consumer()
    with pytest.raises(shmbridge.LaneFull):
        producer.put(roles.pattern("p", FULL), group_id=FULL)
    if end == "killed":
        child.kill()
    else:
        child.tell()
        assert child.line() == "same"
        child.until("dropped")
    # a released lease ends with its last view; a dropped one is never released
    comes_again = end == "killed" or how != "released"
    consumer = make_consumer()
    left = [(0, True)] if comes_again else []
    assert take(consumer, {"p": FULL - 1 + comes_again}) == {
        "p": left + [(sequence, False) for sequence in range(1, FULL)]
    }
    producer.put(roles.pattern("p", FULL), group_id=FULL)
    assert take(consumer, {"p": 1}) == {"p": [(FULL, False)]}
    producer.close()
    consumer.close()
    assert segments() == []


def test_a_stopped_consumer_with_views_is_waited_for(actor, make_producer, make_consumer, roles, until):
    """Producers wait for room; when it goes on its bytes are what they were."""
    import os
    import signal

    producer = make_producer(producer_id="p", on_full="raise")
    for sequence in range(FULL):
        producer.put(roles.pattern("p", sequence), group_id=sequence)
    child = actor("keep_a_view", "held")
    child.until("closed")
    child.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(20):
        with pytest.raises(shmbridge.ConsumerTaken):
            make_consumer()
        with pytest.raises(shmbridge.LaneFull):
            producer.put(roles.pattern("p", FULL), group_id=FULL)
    child.go_on()
    child.tell()
    assert child.line() == "same"
    child.until("dropped")
    make_consumer().get(5).release()
