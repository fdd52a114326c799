"""An observer's copies: whole, in order, counted when missed, and of no consequence to anybody else."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import shmbridge
from shmbridge.record import lane_name
from shmbridge.segments import segment
from shmbridge.testing import wait_until
from shmbridge.watch.observer import Observer
from shmbridge.watch.snapshot import look


def group(number, tokens=32):
    return {
        "tokens": [np.full(tokens, number, np.int32)],
        "advantages": [np.full(tokens, number, np.float32)],
        "scores": [float(number)],
    }


def numbers(records):
    return [int(record["tokens"].values[0]) for record in records]


@pytest.fixture
def observer(bridge):
    with Observer(bridge) as made:
        yield made


def test_copies_what_is_held_and_what_comes(bridge, make_producer, make_consumer):
    producer, consumer = make_producer(), make_consumer()
    producer.put(group(1), group_id="first", policy_version=3)
    with Observer(bridge) as observer:
        producer.put(group(2))
        found = observer.poll()
        assert numbers(found) == [1, 2]
        assert (found[0].meta.group_id, found[0].meta.min_policy_version) == ("first", 3)
        assert found[0].meta.producer_id == producer.producer_id
        assert found[1].to_scored_data()["scores"] == [2.0]
        assert observer.poll() == []
        assert observer.missed == 0
    assert numbers(consumer.poll()) == [1, 2], "an observer takes nothing away"


def test_a_copy_outlives_release_reuse_and_the_lane(bridge, make_producer, make_consumer, observer):
    producer, consumer = make_producer(), make_consumer()
    producer.put(group(7))
    (copy,) = observer.poll()
    values = copy["tokens"].values
    for number in range(200):  # round the lane, several times
        with consumer.get(5):
            producer.put(group(number))
    producer.close()
    for record in consumer.poll():
        record.release()
    assert values.tolist() == [7] * 32
    assert not values.flags.writeable
    copy.release()
    assert values.tolist() == [7] * 32
    assert values.ctypes.data % 64 == 0


def test_counts_what_was_released_before_it_looked(make_producer, make_consumer, observer):
    producer, consumer = make_producer(), make_consumer()
    assert observer.poll() == []
    for number in range(500):
        producer.put(group(number))
        consumer.get(5).release()
    producer.put(group(500))
    found = observer.poll()
    assert numbers(found) == [500]
    assert observer.missed == 500


def test_only_new_records_if_asked(bridge, make_producer):
    producer = make_producer()
    producer.put(group(1))
    with Observer(bridge, backlog=False) as observer:
        producer.put(group(2))
        assert numbers(observer.poll()) == [2]
        assert observer.missed == 0


def test_the_newest_of_a_lane_again_and_again(make_producer, make_consumer, observer):
    producer, consumer = make_producer(), make_consumer()
    producer.put(group(1))
    producer.put(group(2))
    (name,) = {lane_name(record) for record in observer.poll()}
    for _ in range(2):
        assert numbers([observer.newest(name)]) == [2]
    for record in consumer.poll():
        record.release()
    assert observer.newest(name) is None
    assert observer.newest("/shmbridge.none.l.0") is None
    assert observer.missed == 0


def test_waits_for_a_record_and_for_a_bridge(make_producer, observer):
    assert not observer.wait(0.05)
    producer = make_producer()
    producer.put(group(1))
    assert observer.wait(5)
    assert numbers(observer.poll()) == [1]
    assert not observer.wait(0)


def test_a_lane_that_is_gone_is_let_go(bridge, make_producer, make_consumer, observer):
    producer, consumer = make_producer(), make_consumer()
    producer.put(group(1))
    assert len(observer.poll()) == 1
    producer.close()
    with consumer.get(5):
        pass
    deadline_s = time.monotonic() + 20
    while lanes_mapped(bridge):
        assert time.monotonic() < deadline_s
        assert consumer.poll() == []  # it notices the end of the lane
        assert not observer.wait(0.02)


def lanes_mapped(bridge):
    """Lanes that this process maps, but for its producer's."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [words for words in maps if words[1] == "r--s" and f".{bridge}.l." in words[-2]]


def test_lanes_take_turns(make_producer, observer):
    busy, calm = make_producer(), make_producer()
    for number in range(20):
        busy.put(group(number))
    calm.put(group(99))
    observer.wait(5)
    assert 99 in numbers(observer.poll(max_records=4))


PRODUCE = """
import sys, numpy as np, shmbridge
with shmbridge.Producer(sys.argv[1], lane_bytes="256K") as producer:
    for number in range(int(sys.argv[2])):
        tokens = 1 + number * 7919 % 3000
        columns = {"tokens": np.int32, "advantages": np.float32}
        producer.put({name: [np.full(tokens, number, dtype)] for name, dtype in columns.items()})
"""


def test_no_copy_is_torn_beside_a_quick_consumer(bridge, make_consumer, observer):
    """Every slot and every byte is written again and again while the observer copies."""
    total, released, rests, copied, last = 20_000, 0, 0, 0, -1
    consumer = make_consumer()
    child = subprocess.Popen(
        [sys.executable, "-c", PRODUCE, bridge, str(total)],
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(shmbridge.__file__))},
    )
    stop, wrong = False, []

    def look():
        nonlocal copied, last
        for record in observer.poll():
            number = record.meta.sequence
            assert number > last
            last = number
            tokens, advantages = record["tokens"].values, record["advantages"].values
            assert tokens.size == advantages.size == 1 + number * 7919 % 3000
            assert (tokens == number).all()
            assert (advantages == number).all()
            copied += 1

    def watch():
        try:
            while not stop:
                look()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        while released < total:
            consumer.get(30).release()
            released += 1
            for record in consumer.poll():
                record.release()
                released += 1
            if released // 400 > rests and released < total:  # on a busy machine the observer comes too late
                rests, before = released // 400, copied
                wait_until(lambda before=before: copied > before or wrong, 20)
    finally:
        stop = True
        thread.join()
        child.wait(30)
    assert not wrong, wrong
    look()
    assert copied > rests >= 25
    assert copied + observer.missed == total


def test_a_lane_that_came_and_went_between_two_looks_is_counted(bridge, make_consumer, observer):
    consumer = make_consumer()
    for _ in range(3):
        with shmbridge.Producer(bridge, lane_bytes="64K") as producer:
            producer.put(group(1))
            consumer.get(5).release()
        wait_until(lambda: (consumer.poll(), not segment.lane_names(bridge))[1])
    assert observer.poll() == []
    assert (observer.missed_lanes, observer.missed) == (3, 0)


def test_a_lane_is_opened_at_once_when_it_comes(make_producer, make_consumer, observer):
    """Not at the next look for lanes, a tenth of a second later."""
    consumer, producer = make_consumer(), make_producer()
    assert not observer.wait(0)
    producer.put(group(1))
    make_producer().put(group(2))
    assert sorted(numbers(observer.poll(1) + observer.poll(1))) == [1, 2]
    assert len(consumer.poll()) == 2
    assert observer.missed_lanes == 0


def test_without_the_kernels_notes_it_observes_all_the_same(bridge, make_producer, monkeypatch):
    monkeypatch.setattr("shmbridge.watch.observer.ctypes.CDLL", lambda *_, **__: object())
    with Observer(bridge) as observer:
        make_producer().put(group(1))
        assert numbers(observer.poll()) == [1]
        assert observer.missed_lanes == 0


def test_ends_with_what_is_there_if_asked(bridge, make_producer):
    producer = make_producer()
    producer.put(group(1))
    with Observer(bridge, follow=False) as observer:
        producer.put(group(2))
        make_producer().put(group(3))
        assert observer.wait(0)
        assert numbers(observer.poll()) == [1]
        assert not observer.wait(0)
        assert observer.poll() == []


def test_nothing_is_counted_twice_after_the_end(make_producer, observer):
    make_producer().put(group(1))
    assert len(observer.poll()) == 1
    observer.close()
    assert observer.poll() == []
    assert not observer.wait(0)
    assert (observer.missed, observer.missed_lanes) == (0, 0)


def test_a_lane_that_no_descriptor_was_left_for_is_opened_later(bridge, make_producer, observer):
    producer = make_producer()
    producer.put(group(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shmbridge.watch.observer.open_mapping", none_left)
        assert observer.poll() == []
        assert list(observer.unreadable.values()) == ["[Errno 24] Too many open files"]
    assert numbers(observer.poll()) == [1]
    assert observer.unreadable == {}


def none_left(*_, **__):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


SLEEPING = """
import shmbridge
consumer = shmbridge.Consumer(bridge)
print("ready", flush=True)
consumer.get(60)
"""


def test_an_observer_wakes_nobody(bridge, child, make_producer):
    """A consumer that sleeps is not woken more often because somebody looks as fast as it can."""
    producer = make_producer()
    sleeping = child(SLEEPING)
    wait_until(lambda: look(bridge).consumer and look(bridge).consumer.asking_s)
    bells = words_rung(bridge, producer)
    alone = switches_in(1.0, sleeping.pid, lambda: time.sleep(0.01))
    with Observer(bridge) as observer:
        watched = switches_in(1.0, sleeping.pid, lambda: (observer.poll(), observer.wait(0), look(bridge)))
    assert watched <= alone + 5
    assert words_rung(bridge, producer) == bells


def words_rung(bridge, producer):
    """The bells of the bridge, of its arrivals and of the lane."""
    control = Path(f"/dev/shm{segment.control_name(bridge)}").read_bytes()
    lane = Path(f"/dev/shm{producer.lane_name}").read_bytes()
    return control[0x200:0x204], control[0x280:0x284], lane[0x400:0x404]


def switches_in(seconds, pid, work):
    """How often a process' threads gave up the CPU or lost it, while `work` was done again and again."""
    before, until_s = switches(pid), time.monotonic() + seconds
    while time.monotonic() < until_s:
        work()
    return switches(pid) - before


def switches(pid):
    statuses = [task.joinpath("status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(
        int(line.split()[1]) for text in statuses for line in text.splitlines() if "ctxt_switches" in line
    )
