"""The group queues: each change is one call of compiled code, in which no signal handler can run."""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shmbridge
from shmbridge._ext.groups import AtroposScheduler, FairScheduler, Group, GroupQueues, OldestScheduler
from shmbridge.control.environments import EnvWeight

SCHEDULERS: dict[str, Callable[[], Any]] = {
    "fair": lambda: FairScheduler(10.0),
    "oldest": OldestScheduler,
    "atropos": AtroposScheduler,
}


class Watch:
    """Makes calls, and notes each Python function that runs in them."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                self.seen.append(f"{call.__name__}: {frame.f_code.co_qualname}")

        gc.disable()  # other packages, hypothesis for one, have callbacks of their own in a collection
        sys.setprofile(profile)
        try:
            return call(*args, **options)
        finally:
            sys.setprofile(None)
            gc.enable()


@pytest.fixture
def records(make_consumer, make_producer) -> Iterator[list]:
    """Whole groups of two environments, two fragments of one, and one of evaluation, of rising versions."""
    consumer, producers = make_consumer(), [make_producer() for _ in range(2)]
    for number in range(6):
        for env_id, producer in enumerate(producers):
            group = {"tokens": [[number], [1, 2]], "env_id": env_id}
            producer.put(group, policy_version=number, split="eval" if number == 5 else "train")
    for _ in range(2):
        producers[0].put({"tokens": [[1]]}, group_id="g", group_size=2, policy_version=3)
    producers[1].put({"tokens": [[1]]}, group_id="left", group_size=2)
    polled = consumer.poll()
    yield polled
    for record in polled:
        record.release()


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_a_change_runs_no_python_code(records, policy) -> None:
    """Else a handler could raise in its middle, or another thread look at it."""
    queues, watch = GroupQueues(SCHEDULERS[policy](), 0.0), Watch()
    ids = sorted({record.meta.producer_id for record in records})
    shares = {each: EnvWeight(number, "e", 1.0 + number, 0.25, 2) for number, each in enumerate(ids)}
    assert watch(queues.add, records, time.monotonic())
    assert watch(queues.reject, queues.whole[0])
    left_out, stale = watch(queues.admit, queues.whole[0], "train", 9, None, shares)
    assert (left_out, stale) == ([], [])
    left_out, stale = watch(queues.admit, None, "train", 9, 7, shares)
    assert ({group.split for group in left_out}, [group.oldest_version for group in stale]) == (
        {"eval"},
        [1, 1],
    )
    taken, *_ = watch(queues.take, 4, True, 0.0, last=True, shares=shares, live=set(ids), counted=True)
    assert queues.in_flight == len(taken) == 2
    watch(queues.begin_step, taken)
    watch(queues.end_step)
    watch(queues.finish, taken)
    assert queues.in_flight == 0
    assert watch(queues.put_back, taken)
    assert watch(queues.put_back, taken)
    assert len({id(group) for group in queues.complete}) == len(queues.complete)
    how = {"last": False, "shares": shares, "live": set(ids), "counted": False}
    _, _, stale = watch(queues.take, 99, False, 0.0, **how, split=None, current=9, most_stale=6)
    assert {group.oldest_version for group in stale} <= {0, 2}
    late, orphans = watch(queues.late, time.monotonic() + 1, set(), set(ids))
    assert [group.group_id for group in late] == ["left"]
    assert orphans == []
    held = watch(queues.close)
    assert len(held) == len({id(group) for group in held}) > 0
    assert (queues.queued(None), queues.add(records, 0.0), queues.put_back(taken)) == (0, False, False)
    assert watch.seen == []


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_a_change_puts_a_collection_off(records, policy) -> None:
    """A collection runs finalizers, which are Python code, wherever memory is asked for."""
    queues, during = GroupQueues(SCHEDULERS[policy](), 60.0), []
    was = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: during.append(phase))
    gc.set_threshold(1, 1, 1)
    try:
        gc.collect()
        during.clear()
        queues.add(records, 0.0)
        queues.admit(None, None, 0, None, {})
        seen = list(during)
    finally:
        gc.set_threshold(*was)
        gc.callbacks.pop()
    assert gc.isenabled()
    assert len(seen) <= 4  # between the calls, and never once per group


def test_a_group_that_is_put_back_before_a_batch_is_taken_must_fit_it(records) -> None:
    """Another thread may put it back at any moment, and the taker of a batch of training gets no other."""
    queues = GroupQueues(OldestScheduler(), 60.0)
    queues.add(records, 0.0)
    evaluated, _ = queues.admit(None, "train", 0, None, {})
    assert queues.put_back(evaluated)
    how = {"last": True, "shares": {}, "live": (), "counted": False}
    taken, left_out, _ = queues.take(99, True, 0.0, **how, split="train")
    assert {group.split for group in taken} == {"train"}
    assert {id(group) for group in left_out} == {id(group) for group in evaluated}


def test_a_group_without_records_is_an_error_and_changes_nothing(records) -> None:
    queues = GroupQueues(FairScheduler(0.0), 60.0)
    queues.add(records[:1], 0.0)
    queues.admit(None, None, 0, None, {})
    whole, *_ = queues.take(1, False, 0.0, last=True, shares={}, live=(), counted=False)
    empty = Group(1, 0.0)
    for ask in ("producer_id", "group_id", "env_id", "split"):
        with pytest.raises(IndexError, match="without records"):
            getattr(empty, ask)
    with pytest.raises(IndexError, match="without records"):
        queues.put_back([*whole, empty])
    assert queues.queued(None) == 0
    assert queues.put_back(whole)
    assert queues.queued(None) == 1


def test_a_closed_consumer_keeps_no_group_of_its_last_step(bridge, make_producer) -> None:
    """It is in cycles with its parts: the bridge must be free without a collection."""
    producer = make_producer()
    limits = {"policy": "oldest", "max_off_policy_steps": 1, "groups_per_step": 1}
    consumer = shmbridge.Consumer(bridge, **limits)
    producer.put({"tokens": [[1]]}, policy_version=0)
    gc.disable()
    try:
        groups = consumer.take_groups(groups=1, timeout_s=5)
        assert len(groups) == 1
        del groups
        consumer.close()
        del consumer
        with shmbridge.Consumer(bridge) as again:
            again.get(timeout_s=5).release()
    finally:
        gc.enable()


def test_a_tuple_of_groups_can_be_put_back(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(), make_consumer()
    producer.put({"tokens": [[1]]})
    consumer.put_back(tuple(consumer.take_groups(groups=1, timeout_s=5)))
    (group,) = consumer.take_groups(groups=1, max_staleness=1 << 70, timeout_s=5)
    group.records[0].release()
