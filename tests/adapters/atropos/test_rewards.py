"""Unedited environments with a reward bridge: other scores, their own kept, all else as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shmbridge

pytest.importorskip("atroposlib")
pytest.importorskip("transformers")

from shmbridge.errors import BadConfig
from shmbridge.producers import atropos
from shmbridge.producers.atropos.lane import carried
from shmbridge.producers.rewards import FunctionScorer, SplitByTurn, StepRewards, StepRow

RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=1000)


@pytest.fixture
def consumer(bridge: str) -> Iterator[shmbridge.Consumer]:
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        yield consumer


async def left(env: Any) -> None:
    """What env_manager does at its end."""

    async def nothing(_: Any) -> None:
        pass

    await atropos._attachments._runs(nothing)(env)


async def started(env: Any) -> None:
    """What env_manager does before its loop."""
    await env.setup()
    await env.register_env()
    await env.get_server_info()
    await env.get_status()


async def test_an_environment_has_other_scores_and_keeps_its_own(
    bridge: str, make_env: Callable[..., Any], script: ModuleType, consumer: shmbridge.Consumer
) -> None:
    """What counts as text is decoded by the environment's tokenizer, and only where it is trained."""
    group = script.groups_of(7) | {"scores": [-1.0, -1.0, 1.0, -1.0], "raw_score": "the environment's word"}
    group["tokens"] = [[999, 5, 6, *row[3:5], 7] for row in group["tokens"]]
    group["tokens"][1][5] = 999
    group["masks"] = [[-100, -100, -100, *row[3:]] for row in group["tokens"]]
    group = {name: group[name] for name in ("tokens", "masks", "scores", "seed", "raw_score")}
    rewards = {"base": {-1: 0}, "format_markers": {"w999": 0.25}, "length_bounty": {"cap": 1, "rate": 0.01}}
    atropos.attach(bridge=bridge, lane_bytes="256K", rewards=rewards)
    env = make_env()
    await started(env)
    await env.handle_send_to_api(dict(group))
    with await consumer.get_async(timeout_s=30) as record:
        assert record["score"].tolist() == pytest.approx([0.03, 0.28, 1.0, 0.03])
        assert record["raw_score"].tolist() == [-1.0, -1.0, 1.0, -1.0]
        assert record["reward_components"] == [
            {"base": base, "w999": marker, "length_bounty": pytest.approx(bounty)}
            for base, marker, bounty in ((0, 0, 0.03), (0, 0.25, 0.03), (1, 0, 0), (0, 0, 0.03))
        ]
        back = record.to_scored_data()
        assert back["scores"] == record["score"].tolist()
        assert (back["seed"], back["raw_score"]) == (7, "the environment's word")
        assert (back["tokens"], back["masks"]) == (group["tokens"], group["masks"])
    await left(env)


async def test_without_rewards_minus_one_stays_minus_one(
    bridge: str, make_env: Callable[..., Any], script: ModuleType, consumer: shmbridge.Consumer
) -> None:
    atropos.attach(bridge=bridge, lane_bytes="256K", rewards={})
    env = make_env()
    await started(env)
    await env.handle_send_to_api(script.groups_of(10) | {"scores": [-1.0, -1.0, 1.0, 0.0]})
    with await consumer.get_async(timeout_s=30) as record:
        assert record["score"].tolist() == [-1.0, -1.0, 1.0, 0.0]
        assert not {"raw_score", "reward_components"} & set(record.columns)
    await left(env)


async def test_steps_can_be_scored_from_code(
    bridge: str, make_env: Callable[..., Any], script: ModuleType, consumer: shmbridge.Consumer
) -> None:
    """They go before what the group's messages say."""

    async def judge(row: StepRow) -> list[float]:
        return [float(row.tokens[end - 1]) for end in row.ends]

    stage = StepRewards(FunctionScorer(judge), SplitByTurn())
    atropos.attach(bridge=bridge, lane_bytes="256K", step_rewards=True, rewards=stage)
    env = make_env()
    await started(env)
    group = script.groups_of(10)
    group["messages"] = [[{"role": "assistant", "content": "a", "reward": 9.0}] for _ in group["tokens"]]
    await env.handle_send_to_api(group)
    with await consumer.get_async(timeout_s=30) as record:
        for row, tokens in enumerate(group["tokens"]):
            assert record["step_rewards"][row].tolist() == [tokens[-1]]
            assert record["step_ends"][row].tolist() == [len(tokens)]
    await left(env)


async def test_groups_that_cannot_have_rewards_are_refused_and_counted(
    bridge: str,
    make_env: Callable[..., Any],
    script: ModuleType,
    consumer: shmbridge.Consumer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def judge(row: StepRow) -> list[float]:
        raise LookupError("no judge")

    caplog.set_level("INFO", "shmbridge")
    atropos.attach(
        bridge=bridge, lane_bytes="256K", rewards=StepRewards(FunctionScorer(judge), SplitByTurn())
    )
    env = make_env()
    await started(env)
    await env.handle_send_to_api(script.groups_of(10))
    await left(env)
    said = [record.getMessage() for record in caplog.records]
    assert sum("FunctionScorer failed: LookupError('no judge')" in each for each in said) == 1
    assert any("0 groups delivered, not delivered: 1 RewardsFailed" in each for each in said)


async def test_an_environment_ends_while_a_judge_does_not_answer(
    bridge: str,
    make_env: Callable[..., Any],
    script: ModuleType,
    consumer: shmbridge.Consumer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = asyncio.Event()

    async def stage(group: Mapping[str, Any]) -> dict[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    caplog.set_level("INFO", "shmbridge")
    atropos.attach(bridge=bridge, lane_bytes="256K", rewards=stage)
    env = make_env()
    await started(env)
    sending = asyncio.create_task(env.handle_send_to_api(script.groups_of(10)))
    await asked.wait()
    lane = atropos._attachments._seats[env].link._lane
    async with asyncio.timeout(30):
        await lane.close()
        await sending
    assert lane.not_delivered == {"Closed ": 1}
    assert lane.unsent == 0
    await left(env)


def test_columns_of_rewards_go_beside_those_of_the_group() -> None:
    group = {"tokens": [[1]], "masks": [[1]], "scores": [1.0], "raw_score": [3]}
    # two rewards for one turn: their places are unknown, which is no loss where steps were scored
    group["messages"] = [[{"role": "assistant", "content": "a", "reward": 1.0}] * 2]
    columns = {"raw_score": [0.0], "step_rewards": [[1.0]], "step_ends": [[1]]}
    took = carried(group, True, None, columns)
    assert took.group == {
        **{name: group[name] for name in ("tokens", "masks", "scores", "messages")},
        **columns,
        "extra": {"raw_score": [3]},
    }
    assert took.left_out == ()


def test_from_the_command_line(
    bridge: str, start_env: Callable[..., Any], tmp_path: Path, script: ModuleType
) -> None:
    rewards = tmp_path / "rewards.yaml"
    rewards.write_text("base: {scale: 10, offset: 1}\n")
    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        env = start_env("--env.items", "10", options=("--rewards", str(rewards)))
        seen = 0

        def ten_items() -> bool:
            nonlocal seen
            for record in consumer.poll():
                with record:
                    raw = record["raw_score"].tolist()
                    assert record["score"].tolist() == [10 * score + 1 for score in raw]
                    assert record["reward_components"] == [
                        {"base": pytest.approx(10 * score + 1)} for score in raw
                    ]
                    seen += 1
            return seen == 11  # one of the items is a list of two

        env.until(ten_items)


def test_a_wrong_file_is_refused_before_anything_runs(
    bridge: str, start_env: Callable[..., Any], tmp_path: Path
) -> None:
    rewards = tmp_path / "rewards.yaml"
    rewards.write_text("format_marker: {<think>: 0.2}\n")
    env = start_env(options=("--rewards", str(rewards)))
    assert env.wait() == 2
    assert "format_marker is not known: did you mean format_markers?" in env.output
    with pytest.raises(BadConfig, match=r"none\.yaml cannot be read"):
        atropos.attach(bridge=bridge, rewards=tmp_path / "none.yaml")
