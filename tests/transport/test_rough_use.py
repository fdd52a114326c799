"""Rough use without effect: descriptors closed under an end, forks in the middle, hundreds of waits given up,
words that wrap.
"""

import asyncio
import glob
import os
import random
import signal
import struct
import threading
import time

import numpy as np
import pytest

import shmbridge
from shmbridge import errors
from shmbridge.weights import WeightsReader, WeightsWriter

DOORBELL, ARRIVALS, SPACE_BELL = 0x200, 0x280, 0x400  # shmbridge/_ext/c/layout.h


def test_all_descriptors_closed_under_a_producer_end_nothing(bridge, make_consumer, child) -> None:
    """Its mapping keeps the lane's lock: it goes on putting, and is alive until its process ends."""
    process = child(
        """
import os, sys, shmbridge
producer = shmbridge.Producer(bridge, lane_bytes="64K")
os.closerange(3, 4096)
producer.put({"tokens": [[1, 2, 3]]})
print("ready", flush=True)
sys.stdin.readline()
os._exit(0)
"""
    )
    hub = make_consumer()
    hub.get(5).release()
    assert hub.stats()["lanes_live"] == 1
    assert not shmbridge.clean(bridge, dry_run=False).removed
    process.stdin.close()
    assert process.wait(30) == 0
    deadline = time.monotonic() + 30
    while hub.stats()["lanes_live"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hub.stats()["lanes_live"] == 0


@pytest.mark.parametrize("lane_bytes", ["64K", "1M"])
def test_the_largest_record_goes_in_twice_and_one_line_more_never(
    make_producer, make_consumer, lane_bytes
) -> None:
    def fits(tokens: int) -> bool:
        with make_producer(lane_bytes=lane_bytes, on_full="raise") as producer:
            try:
                producer.put({"tokens": [[1] * tokens]})
            except errors.RecordTooBig:
                return False
            return True

    low, high = 1, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    for _ in make_consumer().poll():
        pass
    producer = make_producer(lane_bytes=lane_bytes, on_full="raise")
    group = {"tokens": [list(range(low))]}
    first = producer.put(group)
    producer.put(group)
    with pytest.raises(errors.RecordTooBig):
        producer.put({"tokens": [[1] * high]})
    with pytest.raises(errors.LaneFull):
        producer.put(group)
    assert first == 0


def start_at_the_wrap(name: str, at: int) -> None:
    (path,) = glob.glob(f"/dev/shm/{name}")
    with open(path, "r+b") as segment:
        segment.seek(at)
        segment.write(struct.pack("<I", 2**32 - 3))


def test_sleepers_are_woken_while_the_bells_wrap(bridge, make_producer, make_consumer) -> None:
    hub, producer = make_consumer(), make_producer(on_full="block")
    start_at_the_wrap(f"shmbridge.{bridge}.c", DOORBELL)
    start_at_the_wrap(f"shmbridge.{bridge}.c", ARRIVALS)
    start_at_the_wrap(f"shmbridge.{bridge}.l.*", SPACE_BELL)
    for number in range(6):  # a consumer asleep
        timer = threading.Timer(0.05, producer.put, ({"tokens": [[number]]},))
        timer.start()
        with hub.get(20) as record:
            assert record["tokens"][0].tolist() == [number]
        timer.join()
    filling = {"tokens": [[7] * 3000]}
    for _ in range(6):  # a producer asleep on a full lane
        while True:
            try:
                producer.put(filling, timeout_s=0)
            except errors.LaneFull:
                break
        timer = threading.Timer(0.05, lambda: [record.release() for record in hub.poll()])
        timer.start()
        producer.put(filling, timeout_s=20)
        timer.join()
        for record in hub.poll():
            record.release()
    for number in range(6):  # lanes that come late
        with make_producer() as late:
            late.put({"tokens": [[number]]})
            hub.get(20).release()
    assert hub.stats()["late_wakes_total"] == 0
    assert producer.stats()["late_wakes_total"] == 0


async def test_waits_given_up_by_the_hundred_lose_nothing(make_producer, make_consumer) -> None:
    hub, producer, rng = make_consumer(), make_producer(on_full="block", lane_bytes="1M"), random.Random(5)
    total, seen = 300, []

    def put() -> None:
        for number in range(total):
            producer.put({"tokens": [[number]]}, timeout_s=60)
            time.sleep(rng.uniform(0, 0.002))

    def note(record) -> None:
        with record:
            seen.append(int(record["tokens"][0][0]))

    thread = threading.Thread(target=put)
    thread.start()
    given_up = 0
    while len(seen) < total:
        task = asyncio.ensure_future(hub.get_async(60))
        done, _ = await asyncio.wait([task], timeout=rng.uniform(0, 0.003))
        if not done:
            task.cancel()
        try:
            note(await task)
        except asyncio.CancelledError:
            given_up += 1
    thread.join()
    assert seen == list(range(total))
    assert given_up > 20, "this was no storm"
    assert hub.stats()["leases_dropped_total"] == 0


@pytest.mark.parametrize("hold", ["step", "caller"])
def test_a_fork_in_the_middle_of_everything_costs_the_parent_nothing(
    make_producer, make_consumer, hold
) -> None:
    """An open claim, a batch in hand and one formed ahead: the child uses them all, drops them, and goes."""
    hub, producer = make_consumer(), make_producer(lane_bytes="1M", on_full="raise")
    for number in range(6):
        producer.put({"tokens": [[number] * 4]})
    batches = hub.batches(groups=1, prefetch=1, hold=hold, timeout_s=20)
    batch = next(batches)
    with producer.claim(rows=1, lengths={"tokens": [3]}) as slot:
        if (pid := os.fork()) == 0:
            wrong = 0
            for use in (
                batch.release,
                hub.poll,
                lambda: producer.put({"tokens": [[1]]}),
                hub.close,
                producer.close,
            ):
                try:
                    use()
                except (errors.ShmBridgeError, BufferError):
                    pass
                except BaseException:
                    wrong = 1
            del batch, batches
            os._exit(wrong)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        slot["tokens"][:] = [60, 61, 62]
    assert batch.tokens.ravel().tolist() == [0] * 4
    batch.release()
    seen = []
    for batch in batches:
        seen.append(batch.tokens.ravel().tolist())
        batch.release()
        if len(seen) == 6:
            break
    assert seen == [[number] * 4 for number in range(1, 6)] + [[60, 61, 62]]


@pytest.mark.timeout(120, method="thread")  # the other method is the signal that this test takes
def test_a_handler_that_closes_a_producer_at_any_time_loses_nothing_that_was_told(
    make_producer, make_consumer
) -> None:
    hub, rng = make_consumer(), random.Random(3)
    told: dict[str, int] = {}
    came: dict[str, list[int]] = {}
    closed = 0

    def note(record) -> None:
        with record:
            came.setdefault(record.meta.producer_id, []).append(int(record["tokens"][0][0]))

    before = signal.getsignal(signal.SIGALRM)
    try:
        for life in range(40):
            producer = make_producer(lane_bytes="1M", on_full="raise")
            signal.signal(signal.SIGALRM, lambda *_, producer=producer: producer.close())
            told[producer.producer_id] = 0
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3))
            number = 0
            try:
                while True:
                    if life % 2:
                        with producer.claim(rows=1, lengths={"tokens": [2]}) as slot:
                            slot["tokens"][:] = [number, life]
                    else:
                        producer.put({"tokens": [[number, life]]})
                    number += 1
                    told[producer.producer_id] = number
            except (errors.Closed, errors.ClaimOpen):  # the second: closed between the claim and the writing
                closed += 1
            except errors.LaneFull:
                producer.close()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for record in hub.poll(100_000):
                note(record)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    while sum(map(len, came.values())) < sum(told.values()):
        note(hub.get(20))
    assert closed > 5, "the handler came too late"
    for producer_id, count in told.items():
        numbers = came.get(producer_id, [])
        assert numbers == list(range(len(numbers)))
        assert count <= len(numbers) <= count + 1, "at most the one under way came untold"


VERSIONS = {
    "publish_policy_version": lambda consumer, producer, version: consumer.publish_policy_version(version),
    "note_training_version": lambda consumer, producer, version: consumer.note_training_version(version),
    "put": lambda consumer, producer, version: producer.put({"tokens": [[1]]}, policy_version=version),
    "put, oldest": lambda consumer, producer, version: producer.put(
        {"tokens": [[1]]}, policy_version=(version, 9)
    ),
    "max_staleness": lambda consumer, producer, version: next(
        consumer.batches(groups=1, max_staleness=version, timeout_s=0.1)
    ),
    "weights": lambda consumer, producer, version: publish_weights(consumer.bridge, version),
    "lease": lambda consumer, producer, version: lease_weights(consumer.bridge, version),
}


def publish_weights(bridge: str, version: object) -> None:
    with WeightsWriter(bridge) as writer:
        writer.publish(version, [("a", np.zeros(3, np.float32))])


def lease_weights(bridge: str, version: object) -> None:
    with WeightsReader(bridge) as reader, reader.lease(version=version, timeout_s=0.1):
        pass


class TensorTrue:
    """Like torch's, it has an index."""

    dtype = "torch.bool"

    def __index__(self) -> int:
        return 1

    def __str__(self) -> str:
        return "TensorTrue"


@pytest.mark.parametrize("version", [True, False, np.True_, 1.0, "1", TensorTrue()], ids=str)
@pytest.mark.parametrize("door", VERSIONS)
def test_a_version_is_a_whole_number_at_every_door(door, version, consumer, producer) -> None:
    with pytest.raises((errors.BadArgument, errors.InvalidRecord), match=str(version)):
        VERSIONS[door](consumer, producer, version)
    assert consumer.poll() == []


def test_versions_are_numbers_of_any_integer_type(consumer, producer) -> None:
    producer.put({"tokens": [[1]]}, policy_version=(np.int32(1), np.uint64(2)))
    with consumer.get(5) as record:
        assert (record.meta.min_policy_version, record.meta.max_policy_version) == (1, 2)
