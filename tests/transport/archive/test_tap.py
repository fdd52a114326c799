"""A tap has every record before anybody else, and what it refuses stays un-released."""

import threading
from collections.abc import Callable

import pytest

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.archive.recorder import Recorder
from shmbridge.metrics import bridge_metrics


class Seen:
    """A tap that notes what it gets, and refuses while it is told to."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.refuses, self.closed, self.wait = False, 0, threading.Event()
        self.wait.set()

    def take(self, records) -> None:
        self.wait.wait(10)
        if self.refuses:
            raise RuntimeError("not now")
        self.sequences += [record.meta.sequence for record in records]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def tap() -> Seen:
    return Seen()


def test_every_way_of_taking_goes_through_it(make_consumer, make_producer, tap):
    consumer, producer = make_consumer(tap=tap), make_producer()
    for number in range(8):
        producer.put({"tokens": [[number]]})
    with consumer.get(5):
        assert tap.sequences == [0]
    for record in consumer.poll(2):
        record.release()
    assert tap.sequences == [0, 1, 2]
    for record in consumer:
        assert record.meta.sequence == 3
        record.release()
        break
    with next(consumer.batches(groups=2, prefetch=1)) as batch:
        assert [record.meta.sequence for group in batch.groups for record in group.records] == [4, 5]
    for group in consumer.take_groups(groups=2, timeout_s=5):
        for record in group.records:
            record.release()
    assert tap.sequences == list(range(8))


def test_what_it_refuses_comes_again_first_and_is_unreleased(make_consumer, make_producer, tap):
    consumer, producer = make_consumer(tap=tap), make_producer()
    for number in range(3):
        producer.put({"tokens": [[number]]})
    tap.refuses = True
    for take in (lambda: consumer.poll(2), lambda: consumer.get(1)):
        with pytest.raises(RuntimeError, match="not now"):
            take()
    assert producer.stats()["held"] == 3
    assert consumer.stats()["held"] == 3
    assert consumer.stats()["leases_dropped_total"] == 0
    tap.refuses = False
    got = [consumer.get(1), *consumer.poll()]
    assert [record.meta.sequence for record in got] == tap.sequences == [0, 1, 2]
    assert not any(record.meta.redelivered for record in got)


def test_what_it_never_took_goes_to_the_next_consumer(make_consumer, make_producer, tap):
    consumer, producer = make_consumer(tap=tap), make_producer()
    producer.put({"tokens": [[1]]})
    tap.refuses = True
    with pytest.raises(RuntimeError):
        consumer.get(1)
    consumer.close()
    assert tap.closed == 1
    with make_consumer().get(5) as record:
        assert record["tokens"].values.tolist() == [1]


def test_its_look_is_not_the_users(make_consumer, make_producer, tap):
    """A record that only the tap has read is handed out again when its lease is dropped."""
    consumer, producer = make_consumer(tap=tap), make_producer()
    producer.put({"tokens": [[1]]})
    record = consumer.get(5)
    del record
    with pytest.warns(ResourceWarning, match="handed out again"), consumer.get(5) as record:
        assert record.meta.sequence == 0
    assert tap.sequences == [0, 0]


def test_ranks_records_go_through_it(make_consumer, make_producer, make_rank, tap):
    consumer, producer = make_consumer(tap=tap), make_producer()
    consumer.serve_ranks(1, groups=2)
    for number in range(2):
        producer.put({"tokens": [[number]]})
    batches = make_rank().batches(timeout_s=10)
    with next(batches):
        assert tap.sequences == [0, 1]


def test_time_in_it_is_counted_and_seen_from_another_thread(make_consumer, make_producer, tap):
    consumer, producer = make_consumer(tap=tap), make_producer()
    assert consumer.stats()["tap_busy"] == 0
    producer.put({"tokens": [[1]]})
    tap.wait.clear()
    taking = threading.Thread(target=lambda: consumer.get(5).release())
    taking.start()
    until(lambda: consumer.stats()["tap_busy"] == 1 and consumer.stats()["tap_wait_s"] > 0)
    tap.wait.set()
    taking.join()
    stats = consumer.stats()
    assert stats["tap_busy"] == 0
    assert bridge_metrics(stats)["bridge/wait_tap_s"] == stats["tap_wait_s"] > 0
    assert abs(consumer._state.waits()["tap_wait_s"] - stats["tap_wait_s"]) < 1e-6, "what observers see"


def test_without_a_tap_there_is_none(make_consumer):
    consumer = make_consumer()
    assert type(consumer._turns).__name__ == "LanePoller"
    assert "tap_busy" not in consumer.stats()
    assert consumer.stats()["tap_wait_s"] == 0


def test_a_recorder_as_tap(make_consumer, make_producer, tmp_path):
    consumer, producer = make_consumer(tap=Recorder(tmp_path)), make_producer()
    for number in range(3):
        producer.put({"tokens": [[number]]}, group_id=f"g{number}", policy_version=number)
    for record in consumer.poll():
        record.release()
    assert [record.group_id for record in read_archive(tmp_path)] == ["g0", "g1", "g2"]
    consumer.close()
    assert [path.suffix for path in sorted(tmp_path.glob("part-*"))] == [".parquet"]
    assert [record.max_policy_version for record in read_archive(tmp_path)] == [0, 1, 2]


def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    pause = threading.Event()
    for _ in range(5000):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("never so")


def test_records_that_come_again_are_written_once(make_consumer, make_producer, tmp_path):
    """A successor's recorder knows what the folder has."""
    producer = make_producer()
    first = make_consumer(tap=Recorder(tmp_path))
    for number in range(3):
        producer.put({"tokens": [[number]]})
    held = first.poll()
    held[0].release()
    del held
    first.close()
    recorder = Recorder(tmp_path)
    second = make_consumer(tap=recorder)
    again = second.poll()
    assert [record.meta.redelivered for record in again] == [True, True]
    assert recorder.stats()["again_total"] == 2
    second.close()
    assert [record.sequence for record in read_archive(tmp_path)] == [0, 1, 2]
    assert isinstance(again[0], shmbridge.Record)


def test_what_is_no_tap_is_refused_at_once(bridge, tmp_path):
    with pytest.raises(shmbridge.BadArgument, match="Recorder"):
        shmbridge.Consumer(bridge, tap=str(tmp_path))
