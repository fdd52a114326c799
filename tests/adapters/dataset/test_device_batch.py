"""Columns that go straight from the ring to the device: the values of a gathered batch, leases kept as long,
lanes registered once.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.consumers.device_batch import DeviceCopies
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective
from shmbridge.consumers.pinned import PinnedLanes
from shmbridge.record import lane_memory, lane_name

COLUMNS = ("tokens", "inference_logprobs", "advantages", "loss_mask", "token_rewards")
GROUPS = [
    {
        "tokens": [[1, 2, 3], [4]],
        "advantages": [[0.5, 1, 1.5], [2]],
        "score": [1.0, 0.0],
        "inference_logprobs": [[-1, -2, -3], [-4]],
    },
    {"tokens": [[5, 6]], "score": [0.5], "inference_logprobs": [[-5, -6]]},
    {"tokens": [[7], [8, 9], []], "loss_mask": [[1], [0, 1], []]},
]


class Recorder:
    """A driver without a device; records its calls."""

    def __init__(self, refuse_after=None):
        self.registered, self.refuse_after, self.asked = {}, refuse_after, 0
        self.read_only = True

    def takes_read_only(self):
        return self.read_only

    def register(self, address, size, *, written=False):
        assert not written, "a lane is only read"
        self.asked += 1
        if self.refuse_after is not None and self.asked > self.refuse_after:
            return 2
        assert address not in self.registered
        self.registered[address] = size
        return 0

    def unregister(self, address):
        del self.registered[address]
        return 0


class Event:
    """A device's event for copies in progress; counts how often it was waited for."""

    waited = 0

    def synchronize(self):
        self.waited += 1


@pytest.fixture
def batches(producer, consumer):
    def make(copies, groups=GROUPS, **options):
        for number, group in enumerate(groups):
            producer.put(group, group_id=f"g{number}")
        return consumer.batches(
            groups=len(groups), **{"prefetch": 0, "hold": "caller", "make": copies and copies.batch} | options
        )

    return make


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_values_are_those_of_a_gathered_batch(batches, producer, consumer, prefetch):
    random = np.random.default_rng(3)
    groups = [*GROUPS]
    for _ in range(20):
        lengths = random.integers(1, 40, 4)
        groups.append(
            {
                "tokens": [random.integers(0, 1000, length) for length in lengths],
                "inference_logprobs": [-random.random(length) for length in lengths],
                "score": random.random(4),
            }
        )
    plain = next(batches(None, groups))
    expected = {name: plain[name] for name in COLUMNS if name in plain}
    with DeviceCopies("cpu", COLUMNS) as copies:
        found = next(batches(copies, groups, prefetch=prefetch))
        assert set(found.columns) == set(plain.columns)
        for name, values in expected.items():
            assert isinstance(found[name], torch.Tensor)
            np.testing.assert_array_equal(found[name].numpy(), values)
            assert found[name].numpy().dtype == values.dtype
            np.testing.assert_array_equal(found.has(name), plain.has(name))
        assert found.token_rewards is None
        np.testing.assert_array_equal(found.scores, plain.scores)
        np.testing.assert_array_equal(found.position_ids, plain.position_ids)
        np.testing.assert_array_equal(found.cu_seqlens, plain.cu_seqlens)
        plain.release()
        found.release()
    assert consumer.stats()["held"] == 0


def test_columns_that_go_to_the_device_are_not_gathered(batches):
    """The host's arrays hold no byte of what goes straight to the device."""
    with DeviceCopies("cpu", COLUMNS) as copies:
        found = next(batches(copies))
        assert [name for name in found.columns if isinstance(found[name], np.ndarray)] == ["score"]
        bare = shmbridge.Batch(found.groups, "packed", in_place=COLUMNS)
        assert bare.columns == ["score"]
        assert bare.tokens is None
        found.release()


def test_a_ring_is_never_written(batches):
    with DeviceCopies("cpu", ("tokens",)) as copies:
        found = next(batches(copies))
        found.tokens.fill_(0)
        assert [record["tokens"].values.tolist() for record in found.records] == [
            [1, 2, 3, 4],
            [5, 6],
            [7, 8, 9],
        ]
        found.release()


def test_leases_last_until_release_and_tensors_longer(batches, consumer):
    with DeviceCopies("cpu", ("tokens",)) as copies:
        found = next(batches(copies))
        assert consumer.stats()["held"] == 3
        tokens = found.tokens
        found.release()
        assert consumer.stats()["held"] == 0
        assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_batch_under_gather_is_held_only_until_copied(batches, consumer):
    with DeviceCopies("cpu", COLUMNS) as copies:
        found = next(batches(copies, hold="gather"))
        assert consumer.stats()["held"] == 0
        assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_batch_that_is_dropped_ends_its_copies_first(batches, consumer):
    with DeviceCopies("cpu", ("tokens",)) as copies:
        iterator = batches(copies)
        found = next(iterator)
        event = found._event = Event()
        found._under_way = [torch.empty(0)]
        found.records = []  # as of a batch that went back because it grew stale
        iterator.close()
        assert event.waited == 0
        del found
        gc.collect()
        assert event.waited == 1


def test_a_column_without_a_value_per_token_is_refused(batches):
    with DeviceCopies("cpu", ("score",)) as copies, pytest.raises(ValueError, match="no value per token"):
        next(batches(copies))
    with DeviceCopies("cpu") as copies, pytest.raises(ValueError, match="packed"):
        copies.batch([], "padded")


def test_a_lane_is_registered_once_in_pieces_and_let_go(make_producer, make_consumer, caplog):
    producer, consumer = make_producer(), make_consumer()
    driver = Recorder()
    with DeviceCopies("cpu", ("tokens",), PinnedLanes(driver, piece_bytes=1 << 14)) as copies:
        tokens = [np.arange(6000, dtype=np.int32)]  # more than two pieces
        for _ in range(2):
            producer.put({"tokens": tokens, "prompt_length": [1]})
            batch = next(consumer.batches(groups=1, prefetch=0, make=copies.batch))
            np.testing.assert_array_equal(batch.tokens.numpy(), tokens[0])
            lane = lane_memory(batch.records[0])
            assert sum(driver.registered.values()) == copies.lanes.bytes == lane.nbytes
            assert driver.asked == -(-lane.nbytes // (1 << 14))
            assert lane.readonly
            lane.release()
            batch.release()
            del batch
        name = list(copies.lanes._lanes)
        assert os.path.exists("/dev/shm" + name[0])
    assert driver.registered == {}
    assert not caplog.records


def test_no_part_crosses_the_border_of_two_registrations(producer, consumer):
    producer.put({"tokens": [np.arange(6000, dtype=np.int32)]})
    record = consumer.get(1.0)
    lanes = PinnedLanes(Recorder(), piece_bytes=4096)
    lanes.pin(record)
    base = np.frombuffer(lane_memory(record), np.uint8).ctypes.data
    parts = list(lanes.cut(record, record["tokens"].values))
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(6000))
    for part in parts:
        first = part.ctypes.data - base
        assert first // 4096 == (first + part.nbytes - 1) // 4096
    lanes.close()


def test_a_refused_registration_is_logged_once_and_its_lane_copied_all_the_same(batches, caplog):
    driver = Recorder(refuse_after=1)
    with DeviceCopies("cpu", ("tokens",), PinnedLanes(driver, piece_bytes=4096)) as copies:
        found = next(batches(copies))
        assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        found.release()
    assert driver.registered == {}
    assert len([each for each in caplog.records if "slower" in each.message]) == 1


def test_a_lane_is_not_let_go_while_a_batch_is_formed_from_it(producer, consumer):
    """Closing waits for the thread that forms batches ahead, and none is formed after it: what it had taken
    stays in the lane.
    """
    inside, go_on = threading.Event(), threading.Event()
    driver = Recorder()

    class Slow(PinnedLanes):
        def cut(self, record, values):
            inside.set()
            assert go_on.wait(30.0)
            assert driver.registered, "the lane was let go under the copy"
            return super().cut(record, values)

    copies = DeviceCopies("cpu", COLUMNS, Slow(driver))
    for number in range(3):
        producer.put(GROUPS[0], group_id=f"g{number}")
    formed = []
    with ThreadPoolExecutor(2) as pool:
        iterating = pool.submit(
            lambda: formed.append(
                next(consumer.batches(groups=1, prefetch=1, hold="caller", make=copies.batch))
            )
        )
        assert inside.wait(30.0)
        closing = pool.submit(copies.close)
        assert not closing.done()
        go_on.set()
        closing.result(30.0)
        iterating.result(30.0)
    assert driver.registered == {}
    with pytest.raises(ValueError, match="closed"):
        copies.batch([])
    formed[0].release()


def test_a_dead_lane_is_let_go_when_another_comes(make_producer, make_consumer, until):
    consumer, driver = make_consumer(), Recorder()
    with DeviceCopies("cpu", ("tokens",), PinnedLanes(driver)) as copies:
        first = make_producer()
        first.put({"tokens": [[1]]})
        batch = next(consumer.batches(groups=1, prefetch=0, make=copies.batch))
        name = lane_name(batch.records[0])
        batch.release()
        first.close()
        until(lambda: not os.path.exists("/dev/shm" + name))
        make_producer().put({"tokens": [[2]]})
        batch = next(consumer.batches(groups=1, prefetch=0, make=copies.batch))
        assert len(copies.lanes._lanes) == len(driver.registered) == 1
        assert name not in copies.lanes._lanes
        batch.release()


def test_the_learner_gets_the_same_gradient_either_way(batches, tiny_model):
    def gradient(batch):
        own = Learner(tiny_model(2), Objective(layout="packed"), lambda step: 1e-2)
        metrics = own.accumulate(batch)
        return metrics["policy_loss"], [each.grad for each in own.model.parameters()]

    group = {
        "tokens": [[3, 4, 5], [6, 7]],
        "score": [1.0, 0.0],
        "inference_logprobs": [[1.0, -2, -3], [1.0, -2]],
    }
    groups = [group | {"prompt_length": [1, 1]}] * 2
    plain = next(batches(None, groups))
    with DeviceCopies("cpu") as copies:
        found = next(batches(copies, groups))
        one, other = gradient(plain), gradient(found)
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


KILLED = """
import sys, shmbridge
from shmbridge.consumers.device_batch import DeviceCopies
with shmbridge.Consumer(sys.argv[1]) as consumer, DeviceCopies("cpu") as copies:
    batch = next(consumer.batches(groups=2, make=copies.batch, hold="step"))
    print(batch.tokens.tolist(), flush=True)
    sys.stdin.read()
"""


def test_a_learner_killed_before_release_leaves_the_batch_to_its_successor(
    bridge, make_producer, make_consumer
):
    producer = make_producer()
    env = os.environ | {"PYTHONPATH": str(Path(shmbridge.__file__).parents[1])}
    learner = subprocess.Popen(
        [sys.executable, "-c", KILLED, bridge],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        for number in range(2):
            producer.put({"tokens": [[number, 2, 3]]})
        assert learner.stdout.readline() == "[0, 2, 3, 1, 2, 3]\n"
    finally:
        learner.send_signal(signal.SIGKILL)
        learner.communicate()
    consumer = make_consumer()
    with DeviceCopies("cpu") as copies:
        batch = next(consumer.batches(groups=2, make=copies.batch, timeout_s=10))
        assert batch.tokens.tolist() == [0, 2, 3, 1, 2, 3]
        assert all(meta.redelivered for meta in batch.meta)
        batch.release()


def test_the_learners_option_takes_tokens_straight_from_the_ring(producer, bridge, tmp_path):
    from shmbridge.consumers.learner.config.flags import parse
    from shmbridge.consumers.learner.data.sources import HubSource, feed_of
    from shmbridge.consumers.learner.stopping import StopSignals

    flags = ["--bridge", bridge, "--model", "m", "--steps", "1", "--groups", "1", "--device", "cpu"]
    flags += ["--prefetch", "2", "--run-dir", str(tmp_path)]
    for way, kind in (("direct", torch.Tensor), ("auto", np.ndarray), ("batch", np.ndarray)):
        producer.put({"tokens": [[1, 2]]})
        config = parse([*flags, "--host-copy", way])
        with feed_of(config, shmbridge.Run(), lambda group: True) as feed:
            source = HubSource(feed, config, StopSignals())
            with source.batches() as found:
                batch = next(found)
                assert isinstance(batch.tokens, kind)
                assert batch.tokens.tolist() == [1, 2]
                source.trained([batch])


def test_a_lane_is_mapped_writable_for_a_gpu_that_registers_no_other_memory(producer, consumer):
    producer.put(GROUPS[0])
    record = consumer.get(1)
    for read_only in (True, False):
        driver = Recorder()
        driver.read_only = read_only
        lanes = PinnedLanes(driver)
        lanes.pin(record)
        assert driver.registered
        assert record._lane_reader.lane.data_writable is not read_only
        lanes.close()


def test_a_lane_that_is_gone_is_unregistered_with_the_next_batch_after_its_copies(bridge, consumer):
    driver, under_way = Recorder(), []
    lanes = PinnedLanes(driver)
    with DeviceCopies("cpu", ("tokens",), lanes) as copies, shmbridge.Producer(bridge) as stays:
        copies.finish = lambda: under_way.append(len(driver.registered))
        taken = consumer.batches(groups=1, make=copies.batch, prefetch=0, hold="caller")
        with shmbridge.Producer(bridge) as leaves:
            leaves.put({"tokens": [[1, 2]]})
            next(taken).release()
            (lane,) = driver.registered
        consumer.poll()  # which looks after lanes
        stays.put({"tokens": [[3]]})
        second = next(taken)
        assert under_way == [1], "copies were waited for while the lane was registered"
        assert lane not in driver.registered
        assert len(driver.registered) == 1
        second.release()
        stays.put({"tokens": [[4]]})
        next(taken).release()
        assert under_way == [1], "nobody waits while all lanes are there"
