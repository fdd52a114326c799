"""The group queues: each change is one call of compiled code, in which no signal handler can run."""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmbridge._ext.groups import AtroposScheduler, FairScheduler, GroupQueues, OldestScheduler
from shmbridge.atropos.env_status import EnvWeight

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

        sys.setprofile(profile)
        try:
            return call(*args, **options)
        finally:
            sys.setprofile(None)


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
    taken = watch(queues.take, 4, True, 0.0, last=True, shares=shares, live=set(ids), counted=True)
    assert queues.in_flight == len(taken) == 2
    watch(queues.begin_step, taken)
    watch(queues.end_step)
    watch(queues.finish, taken)
    assert queues.in_flight == 0
    assert watch(queues.put_back, taken)
    assert watch(queues.put_back, taken)
    assert len({id(group) for group in queues.complete}) == len(queues.complete)
    _, stale = watch(queues.cut, None, 9, 7)
    assert all(group.oldest_version < 2 for group in stale)
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
