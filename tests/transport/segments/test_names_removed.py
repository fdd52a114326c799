"""Names removed while all processes live, as systemd-logind's RemoveIPC does: no two hubs read one lane, no
producer puts into a lost lane.
"""

import asyncio
import threading
import time

import numpy as np
import pytest

import shmbridge
from shmbridge.segments import MOUNT, control_name, lane_names

GROUP = {"tokens": [[1, 2, 3]]}


def remove(*names: str) -> None:
    for name in names:
        (MOUNT / name[1:]).unlink()


@pytest.fixture
def remove_all(bridge):
    return lambda: remove(*lane_names(bridge), control_name(bridge))


def fails_within_a_second(put) -> shmbridge.LaneRemoved:
    """A put made a second after the names were removed, or waiting by then, must fail."""
    began = time.monotonic()
    with pytest.raises(shmbridge.LaneRemoved, match=r"SB207.*RemoveIPC") as caught:
        while True:
            put()
            assert time.monotonic() < began + 2
            time.sleep(0.05)  # a lane of 64 slots is not full by then
    return caught.value


def test_a_second_hub_does_not_read_a_lane_that_the_first_reads(
    bridge, producer, make_consumer, caplog, until
) -> None:
    """The control segment's name is removed; a hub that starts then finds the lane, and leaves it until the
    first has ended.
    """
    for number in range(3):
        producer.put({"tokens": [[number]]})
    first = make_consumer()
    record = first.get(1)
    remove(control_name(bridge))
    second = make_consumer()
    assert second.poll() == []
    assert second.stats()["lanes_refused"] == 1
    assert f"lane {producer.lane_name} is refused: another consumer reads it" in caplog.text
    record.release()
    fails_within_a_second(lambda: producer.put(GROUP))
    del record
    first.close()
    until(lambda: second.stats()["lanes_live"] == 1, 5)
    assert [each["tokens"][0].tolist() for each in second.poll(2)] == [[1], [2]]
    assert second.stats()["lanes_refused"] == 0


def test_put_fails_within_a_second_and_the_hub_that_has_the_lane_takes_what_was_committed(
    producer, consumer, remove_all
) -> None:
    consumer.poll()  # the hub has adopted the lane
    remove_all()
    wrong = fails_within_a_second(lambda: producer.put(GROUP))
    assert producer.lane_name in str(wrong)
    committed = int(producer.stats()["records_total"])
    taken = []
    while len(taken) < committed:
        with consumer.get(1) as record:
            taken.append(record.meta.sequence)
    assert taken == list(range(committed))
    with pytest.raises(shmbridge.LaneRemoved):
        producer.put(GROUP)


@pytest.mark.parametrize("which", ["lane", "control"])
def test_either_name_is_missed(bridge, producer, which) -> None:
    remove(producer.lane_name if which == "lane" else control_name(bridge))
    fails_within_a_second(lambda: producer.put(GROUP))
    with pytest.raises(shmbridge.LaneRemoved), producer.claim(1, {"tokens": [1]}):
        pass


def fill(producer: shmbridge.Producer) -> None:
    with pytest.raises(shmbridge.LaneFull):
        while True:
            producer.put({"tokens": [np.arange(4000)]}, timeout_s=0)


def test_a_put_that_waits_fails_within_a_second(make_producer, remove_all) -> None:
    producer = make_producer(on_full="block")
    fill(producer)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            producer.put({"tokens": [np.arange(4000)]})
        except shmbridge.LaneRemoved as wrong:
            errors.append(wrong)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    remove_all()
    waiting.join(2)
    assert not waiting.is_alive()
    assert len(errors) == 1


def test_a_put_async_that_waits_fails_within_a_second(make_producer, remove_all) -> None:
    producer = make_producer(on_full="block")
    fill(producer)

    async def wait() -> None:
        waiting = asyncio.create_task(producer.put_async({"tokens": [np.arange(4000)]}))
        await asyncio.sleep(0.1)
        remove_all()
        with pytest.raises(shmbridge.LaneRemoved):
            await asyncio.wait_for(waiting, 2)

    asyncio.run(wait())


def test_close_says_how_many_records_no_hub_can_reach(make_producer, remove_all, caplog) -> None:
    producer = make_producer()
    for _ in range(3):
        producer.put(GROUP)
    remove_all()
    producer.close()
    assert "records that no consumer can reach: 3" in caplog.text


def test_close_that_drains_does_not_wait_for_nobody(make_producer, remove_all) -> None:
    producer = make_producer()
    producer.put(GROUP)
    remove_all()
    with pytest.raises(shmbridge.LaneRemoved, match="can reach: 1"):
        producer.close(drain=True)


def test_close_says_nothing_while_a_hub_has_the_lane(make_producer, consumer, remove_all, caplog) -> None:
    producer = make_producer()
    producer.put(GROUP)
    held = consumer.get(1)
    remove_all()
    producer.close()
    assert "can be reached" not in caplog.text
    held.release()
