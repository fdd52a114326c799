"""A producer with stages is a producer; what it took is committed or counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import shmbridge
from shmbridge.errors import BadArgument, Closed
from shmbridge.producers.rewards import (
    FunctionScorer,
    RewardBridge,
    RewardedProducer,
    RewardsFailed,
    SplitByTurn,
    Stages,
    StepRewards,
)

GROUP: dict[str, Any] = {"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]], "score": [-1.0]}


class Gate:
    """A stage that waits until it may go on, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.open = asyncio.Event(), asyncio.Event()
        self._error = error

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        self.begun.set()
        await self.open.wait()
        if self._error is not None:
            raise self._error
        return {**group, "score": [5.0]}


@pytest.fixture
def producer(bridge: str) -> Iterator[shmbridge.Producer]:
    with shmbridge.Producer(bridge, env_name="math", lane_bytes="64K") as producer:
        yield producer


def test_all_else_is_the_producers(
    producer: shmbridge.Producer, consumer: shmbridge.Consumer, policy: Any
) -> None:
    with RewardedProducer(producer, RewardBridge({"base": {-1: 0}})) as rewarded:
        assert (rewarded.bridge, rewarded.producer_id) == (producer.bridge, producer.producer_id)
        assert rewarded.put(GROUP, group_id="g", policy_version=3, split="eval") == 0
        with rewarded.claim(1, {"tokens": [2]}) as slot:
            slot["tokens"][:] = [7, 8]
        assert rewarded.stats() == {**producer.stats(), "not_put_total": 0}
        assert "RewardedProducer of <Producer math" in repr(rewarded)
    with consumer.get(timeout_s=10) as record:
        assert (record.meta.group_id, record.meta.split, record.meta.min_policy_version) == ("g", "eval", 3)
        assert (record["score"].tolist(), record["raw_score"].tolist()) == ([0.0], [-1.0])
    with consumer.get(timeout_s=10) as record:
        assert "score" not in record
    with pytest.raises(Closed):
        producer.put(GROUP)


def test_stages_go_one_behind_the_other_also_those_that_wait(
    producer: shmbridge.Producer, consumer: shmbridge.Consumer
) -> None:
    """`put` blocks for them: no event loop runs here."""
    steps = StepRewards(FunctionScorer(lambda row: [0.5]), SplitByTurn())
    bridges = [RewardBridge({"base": {-1: 0}}), RewardBridge({"base": {0: 2}})]
    with pytest.raises(RewardsFailed, match="component 'base' already"):
        Stages(*bridges).now(GROUP)
    rewarded = RewardedProducer(producer, steps, bridges[0])
    assert rewarded.put_many([GROUP, GROUP]) == [0, 1]
    for _ in range(2):
        with consumer.get(timeout_s=10) as record:
            assert record["step_rewards"][0].tolist() == [0.5]
            assert record["step_ends"][0].tolist() == [3]
            assert record["score"].tolist() == [0.0]
    with pytest.raises(BadArgument, match="a str is no stage"):
        RewardedProducer(producer, "stage")  # type: ignore[arg-type]


async def test_put_does_not_stop_an_event_loop(
    producer: shmbridge.Producer, consumer: shmbridge.Consumer
) -> None:
    steps = StepRewards(FunctionScorer(lambda row: [0.5]), SplitByTurn())
    rewarded = RewardedProducer(producer, steps)
    with pytest.raises(BadArgument, match="await put_async"):
        rewarded.put(GROUP)
    assert rewarded.stats()["not_put_total"] == 1
    assert RewardedProducer(producer, RewardBridge({"base": {-1: 0}})).put(GROUP) == 0  # which never waits
    assert await rewarded.put_async(GROUP) == 1
    for _ in range(2):
        consumer.get(timeout_s=10).release()


async def test_a_group_whose_caller_is_cancelled_is_put_all_the_same(
    producer: shmbridge.Producer, consumer: shmbridge.Consumer
) -> None:
    gate = Gate()
    rewarded = RewardedProducer(producer, gate)
    asked = asyncio.create_task(rewarded.put_async(GROUP, group_id="handed over"))
    await gate.begun.wait()
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled()
    assert rewarded.stats()["records_total"] == 0
    gate.open.set()
    with await consumer.get_async(timeout_s=10) as record:
        assert (record.meta.group_id, record["score"].tolist()) == ("handed over", [5.0])


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_stage_that_fails_is_heard_and_counted(producer: shmbridge.Producer, cancelled: bool) -> None:
    gate = Gate(RewardsFailed("no judge"))
    rewarded = RewardedProducer(producer, gate)
    asked = asyncio.create_task(rewarded.put_async(GROUP))
    await gate.begun.wait()
    if cancelled:
        asked.cancel()
        await asyncio.wait([asked])
    gate.open.set()
    if not cancelled:
        with pytest.raises(RewardsFailed, match="no judge"):
            await asked
    async with asyncio.timeout(30):
        while not rewarded.stats()["not_put_total"]:
            await asyncio.sleep(0)
    assert rewarded.stats()["records_total"] == 0


async def test_a_producer_that_was_closed_meanwhile_is_counted(producer: shmbridge.Producer) -> None:
    gate = Gate()
    rewarded = RewardedProducer(producer, gate)
    asked = asyncio.create_task(rewarded.put_async(GROUP))
    await gate.begun.wait()
    rewarded.close()
    gate.open.set()
    with pytest.raises(Closed):
        await asked
    assert rewarded.stats()["not_put_total"] == 1
