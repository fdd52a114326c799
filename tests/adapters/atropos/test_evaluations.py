"""What an environment's `evaluate` measures reaches the consumer, without W&B and without a folder for it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from waiting import until

import shmbridge

pytest.importorskip("atroposlib")

from shmbridge.producers import atropos
from shmbridge.producers.atropos import control_link
from shmbridge.producers.atropos.control_link import Evaluations

RUN = shmbridge.Run(batch_size=8, max_token_len=4096, num_steps=1000)


def step(consumer: shmbridge.Consumer) -> None:
    """Takes what is there, and ends a step of the run, whose policy version is its number."""
    for record in consumer.poll():
        record.release()
    consumer.step_done()
    consumer.publish_policy_version(consumer.current_step)


async def evaluated(env: Any, bridge: str, wanted: int = 1) -> list[Any]:
    """Runs an environment until the consumer has heard of so many evaluations; every step is one's turn."""
    found: list[Any] = []
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        running = asyncio.create_task(env.env_manager())
        try:
            await until(lambda: consumer.stats()["records_total"] > 0)

            def go() -> bool:
                step(consumer)
                found.extend(consumer.take_evaluations())
                return len(found) >= wanted

            async with asyncio.timeout(60):
                while not go():
                    await asyncio.sleep(0.3)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return found


def in_three_ways(script: ModuleType) -> type:
    class Measuring(script.SeededEnv):
        """`evaluate` as environments of Atropos have it: a list for W&B, the log, and what it returns."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.eval_metrics: list[Any] = [("eval/old", 9.0)]

        async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            await asyncio.sleep(0.01)
            self.eval_metrics.append(("eval/percent_correct", 0.5))
            await self.evaluate_log({"eval/pass": True, "eval/text": "no number", "eval/odd": math.nan})
            return {"length": 7, "samples": [1, 2]}

    return Measuring


async def test_all_three_ways_of_saying_it_reach_the_consumer(
    make_env: Callable[..., Any], bridge: str, script: ModuleType
) -> None:
    env = make_env(in_three_ways(script), steps_per_eval=2, collect_s=0.01)
    atropos.attach(env, bridge=bridge, lane_bytes="1M")
    assert not env.config.use_wandb
    assert env.config.data_dir_to_save_evals is None
    found = await evaluated(env, bridge, wanted=2)
    for each in found:
        assert each.env_name == "seeded"
        assert each.metrics == {"eval/percent_correct": 0.5, "eval/pass": 1.0, "length": 7.0}
        assert each.step >= 1
        assert each.policy_version in (each.step - 1, each.step, each.step + 1)
    assert [each.number for each in found] == list(range(1, len(found) + 1))
    assert vars(env).keys().isdisjoint({"evaluate", "evaluate_log"}), "put back at the end"


async def test_an_evaluation_that_fails_is_said_and_the_environment_goes_on(
    make_env: Callable[..., Any], bridge: str, script: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(script.SeededEnv):
        calls = 0

        async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            Failing.calls += 1
            if Failing.calls == 1:
                raise RuntimeError("no such split")
            return {"eval/percent_correct": 1.0}

    env = make_env(Failing, steps_per_eval=2, collect_s=0.01)
    atropos.attach(env, bridge=bridge, lane_bytes="1M")
    (found, *_) = await evaluated(env, bridge)
    assert found.metrics == {"eval/percent_correct": 1.0}
    assert "failed; the environment goes on" in caplog.text
    assert "no such split" in caplog.text


async def test_what_was_measured_without_a_consumer_goes_to_the_next_one(
    make_env: Callable[..., Any], bridge: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_link, "ASK_S", 0.3)
    env = make_env(in_three_ways(script), steps_per_eval=0, collect_s=0.01)
    atropos.attach(env, bridge=bridge, lane_bytes="1M")
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        running = asyncio.create_task(env.env_manager())
        await until(lambda: consumer.stats()["records_total"] > 0)
    await env.evaluate()
    try:
        with shmbridge.Consumer(bridge, run=RUN) as second:
            (found,) = await until(second.take_evaluations)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert found.metrics["eval/percent_correct"] == 0.5


def test_what_waits_is_bounded_and_what_is_lost_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shmbridge")
    waiting = Evaluations("gsm8k")
    for number in range(18):
        waiting.add({"correct": number / 20}, "lane", number, number)
    waiting.add({"x" * 200: 1.0}, "lane", 18, 18)
    assert [each.step for each in waiting.unsent] == list(range(2, 18))
    waiting.refused(ValueError("too large"))
    waiting.leave()
    assert waiting.not_delivered == {
        "evaluations while no consumer answered": 2,
        "metrics beyond what a message takes": 1,
        "evaluations, refused: too large": 1,
        "evaluations at the end": 15,
    }
    assert "evaluation at step 3, policy version 3: correct 0.15" in caplog.text
