"""How a batch is gathered: leases held while it is copied, no GIL, sizes that are checked before anything is
allocated.
"""

import sys
import threading
import time

import numpy as np
import pytest

import shmbridge
from shmbridge._ext.header import LaneCorrupt
from shmbridge._ext.record import Gather, Pool, TooManyTokens, positions
from shmbridge.batch import Batch
from shmbridge.record import Group
from shmbridge.schema import Kind

INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def grouped(records) -> list[Group]:
    groups = [Group(record._group_size, 0.0) for record in records]
    for group, record in zip(groups, records, strict=True):
        group.append(record)
    return groups


@pytest.fixture
def records(producer, consumer):
    def make(*groups):
        for group in groups:
            producer.put(group)
        return consumer.poll()

    return make


def test_a_release_meanwhile_waits_for_the_copy(records, producer) -> None:
    """Another thread may release a record while the copy runs without the GIL: its memory stays until
    then.
    """
    taken = records({"tokens": [[1, 2]]}, {"tokens": [[3]]})
    with Gather([taken], False, Pool()) as gather:
        _, tokens, _, _ = gather.add(b"tokens", Kind.LIST, INT32, per_token=True)
        for record in taken:
            record.release()
        assert producer.stats()["held"] == 2
        gather.copy()
    assert producer.stats()["held"] == 0
    assert tokens.tolist() == [1, 2, 3]


def test_a_batch_that_fails_keeps_no_lease(records, producer) -> None:
    """Keeping the error keeps the frames of the batch, but not the memory of the lane."""
    taken = records({"tokens": [[1]]}, {"tokens": [[2]], "instance_id": ["no text any more"]})
    with open(f"/dev/shm{producer.lane_name}", "r+b") as lane:
        lane.seek(lane.read().index(b"no text any more"))
        lane.write(b"\xff")
    with pytest.raises(shmbridge.RecordUnreadable, match="instance_id") as kept:
        Batch(grouped(taken), "packed")
    for record in taken:
        record.release()
    assert producer.stats()["held"] == 0
    del kept


def test_a_record_that_was_released_before_is_an_error(records) -> None:
    taken = records({"tokens": [[1]]}, {"tokens": [[2]]})
    taken[1].release()
    with pytest.raises(shmbridge.LeaseReleased):
        Batch(grouped(taken), "packed")


def test_nothing_is_copied_after_close(records) -> None:
    gather = Gather([records({"tokens": [[1]]})], False, Pool())
    gather.add(b"tokens", Kind.LIST, INT32, per_token=True)
    gather.close()
    gather.close()
    with pytest.raises(BufferError):
        gather.copy()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_more_tokens_than_int32_counts_are_an_error_with_the_numbers(make_producer, consumer, layout) -> None:
    """Before anything is allocated: the record is in the batch 2048 times over."""
    producer = make_producer(lane_bytes="16M")
    producer.put({"tokens": [np.zeros(1 << 20, np.int32)]})
    (group,) = grouped(consumer.poll())
    with pytest.raises(
        shmbridge.BatchTooBig, match=r"2048 groups has 2147483648 tokens.*2147483647.*fewer groups"
    ):
        Batch([group] * 2048, layout)
    with Gather([group.records] * 2047, False, Pool()) as gather:
        assert int(gather.cu_seqlens[-1]) == gather.tokens == 2047 << 20
    with pytest.raises(TooManyTokens):
        Gather([group.records * 2048], False, Pool())


def test_a_type_that_the_lane_does_not_have_is_refused(records) -> None:
    """No size is used that the lane's own table does not give."""
    float64 = np.dtype(np.float64)
    with Gather(
        [records({"tokens": [[1]], "score": [1.0], "step_rewards": [[1.0]]})], False, Pool()
    ) as gather:
        for name, kind, dtype in (
            (b"tokens", Kind.LIST, float64),
            (b"tokens", Kind.SCALAR, INT32),
            (b"score", Kind.LIST, float64),
        ):
            with pytest.raises(LaneCorrupt, match="is not of one type"):
                gather.add(name, kind, dtype)
        with pytest.raises(LaneCorrupt, match="is not of one type"):
            gather.add(b"step_rewards", Kind.LIST, FLOAT32, per_record=True)
        with pytest.raises(ValueError, match="only lists"):
            gather.add(b"score", Kind.SCALAR, float64, per_token=True)
        present, values, lengths, inner = gather.add(b"no such column", Kind.LIST, FLOAT32)
        gather.copy()
        assert (present.tolist(), values.tolist(), lengths.tolist(), inner) == ([False], [], [0], None)


def test_positions_count_from_zero_in_each_row() -> None:
    assert positions(np.array([2, 0, 3], np.int32), False, Pool()).tolist() == [0, 1, 0, 1, 2]
    assert positions(np.array([2, 0, 3], np.int32), True, Pool()).tolist() == [
        [0, 1, 0],
        [0, 0, 0],
        [0, 1, 2],
    ]
    assert positions(np.array([], np.int32), True, Pool()).shape == (0, 0)


def test_other_threads_run_while_a_large_batch_is_copied(make_producer, consumer) -> None:
    """No thread asks for the GIL: another thread can only have counted if the copy released it by itself."""
    producer = make_producer(lane_bytes="64M")
    producer.put(
        {"tokens": [np.ones(1 << 20, np.int32)] * 3, "advantages": [np.ones(1 << 20, np.float32)] * 3}
    )
    records = consumer.poll()
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)  # lets the GIL go

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        sys.setswitchinterval(1000)
        progress = 0
        for _ in range(100):
            with Gather([records * 2], False, Pool()) as gather:
                for name, dtype in ((b"tokens", INT32), (b"advantages", FLOAT32)):
                    gather.add(name, Kind.LIST, dtype, per_token=True)
                before = counted[0]
                gather.copy()
                progress += counted[0] - before
            if progress:
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert progress > 0
