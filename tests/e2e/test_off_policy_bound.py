"""A learner-like loop over environments that generate in processes of their own: the staleness of what it
trains, with the rule and without.
"""

import time

import pytest

import shmbridge

GENERATE = """
import asyncio, random, sys
import shmbridge

async def main():
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        print("ready", flush=True)
        dice = [random.Random(f"{seed}/{number}") for number in range(workers)]
        await asyncio.gather(*(work(producer, each) for each in dice))

async def work(producer, random):
    while not producer._control.draining:
        try:
            if asks:
                with await producer.begin_group_async(timeout_s=60) as ticket:
                    await generate(producer, random, ticket.policy_version)
            else:
                await generate(producer, random, producer.policy_version)
        except shmbridge.BridgeDraining:
            return

async def generate(producer, random, version):
    await asyncio.sleep(random.uniform(0.001, 0.01))
    await producer.put_async({"tokens": [[1, 2, 3]] * 2}, policy_version=version)

asyncio.run(main())
"""
ENVIRONMENTS, WORKERS, GROUPS, STEPS = 3, 8, 4, 25


@pytest.fixture
def generators(child):
    def start(asks: bool) -> None:
        for number in range(ENVIRONMENTS):
            child(f"asks, workers, seed = {asks}, {WORKERS}, {number}\n{GENERATE}")

    return start


def learn(consumer: shmbridge.Consumer, steps: int) -> list[int]:
    """Staleness of every trajectory that was trained with; a step takes longer than a rollout."""
    seen: list[int] = []
    for number, batch in enumerate(consumer.batches(groups=GROUPS, prefetch=1, timeout_s=60), 1):
        seen += [consumer.policy_version - meta.min_policy_version for meta in batch.meta]
        time.sleep(0.03)
        consumer.publish_policy_version(number)
        if number == steps:
            return seen
    raise AssertionError("the batches ended")


@pytest.mark.parametrize("steps", [0, 1, pytest.param(3, marks=pytest.mark.long)])
def test_staleness_is_within_the_steps_with_the_rule(generators, make_consumer, steps) -> None:
    """Hardly any group is generated in vain: the rule acts before generation, and the cut discards stragglers
    only.
    """
    consumer = make_consumer(policy="oldest", max_off_policy_steps=steps, groups_per_step=GROUPS)
    consumer.publish_policy_version(0)
    generators(asks=True)
    seen = learn(consumer, STEPS)
    stats = consumer.stats()
    consumer.drain()
    assert len(seen) == STEPS * GROUPS * 2
    assert max(seen) <= steps
    assert stats["staleness_max"] == max(seen)
    assert stats["discarded_total{stale}"] <= STEPS * GROUPS // 10
    assert (
        sum(value for key, value in stats.items() if key.startswith("staleness_groups_total"))
        == STEPS * GROUPS
    )


def test_staleness_exceeds_the_steps_without_the_rule(generators, make_consumer) -> None:
    consumer = make_consumer()
    consumer.publish_policy_version(0)
    generators(asks=False)
    seen = learn(consumer, STEPS)
    consumer.drain()
    assert max(seen) > 3


def test_groups_of_an_environment_that_never_asks_are_cut_at_the_consumer(generators, make_consumer) -> None:
    """A producer that cannot ask generates in vain, but is never trained with beyond the limit."""
    consumer = make_consumer(policy="oldest", max_off_policy_steps=1, groups_per_step=GROUPS)
    consumer.publish_policy_version(0)
    generators(asks=False)
    seen = learn(consumer, STEPS)
    stats = consumer.stats()
    consumer.drain()
    assert max(seen) <= 1
    assert stats["discarded_total{stale}"] > 0
