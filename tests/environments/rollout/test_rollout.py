"""Rollout: groups of plain Python episodes arrive at a consumer as they were played, or not at all."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from shmbridge.producers.rollout import NoTokens, Rollout, Task, TooManyFailures
from tests.environments.byte_tokenizer import byte_tokenizer
from tests.environments.scripted_server import ScriptedServer, serving


def tasks(count: int) -> list[Task[str]]:
    return [
        Task([{"role": "user", "content": f"{n}?"}], str(n), instance_id=f"task-{n}") for n in range(count)
    ]


def server(**options) -> ScriptedServer:
    chance = random.Random(5)
    return ScriptedServer(
        byte_tokenizer(),
        lambda prompt: "".join(chance.choices("abc", k=chance.randint(1, 9))),
        owner="shmbridge",
        **options,
    )


@asynccontextmanager
async def rolling(bridge: str, scripted: ScriptedServer, **options):
    async with serving(scripted) as served, Rollout(bridge, served.url, byte_tokenizer(), **options) as made:
        yield made


async def three_turns(episode, data: str) -> None:
    for turn in range(3):
        text = await episode.sample()
        episode.step_reward(len(text))
        if turn < 2:
            episode.observe([{"role": "tool", "content": f"{data}:{len(text)}"}])
    episode.score = sum(episode.step_rewards)
    episode.components = {"length": episode.score}


async def test_rollout_groups_arrive_as_they_were_played(bridge, make_consumer):
    consumer = make_consumer()
    played = {}

    async def play(episode, data):
        await three_turns(episode, data)
        played[episode.instance_id, episode.repetition_id] = episode

    async with rolling(bridge, server(version=3), group_size=4, concurrency=4) as rollout:
        assert await rollout.run(tasks(6), play) == 6
    for _ in range(6):
        with consumer.get(timeout_s=5) as record:
            assert len(record) == 4
            assert (record.meta.min_policy_version, record.meta.max_policy_version) == (3, 3)
            for row in range(4):
                one = played[record["instance_id"][row], int(record["repetition_id"][row])]
                assert record["tokens"][row].tolist() == one.tokens
                assert record["loss_mask"][row].tolist() == one.mask
                assert record["inference_logprobs"][row].tolist() == pytest.approx(one.logprobs)
                assert record["token_versions"][row].tolist() == one.versions
                assert record["step_rewards"][row].tolist() == one.step_rewards
                assert record["step_ends"][row].tolist() == one.step_ends == record["turn_ends"][row].tolist()
                assert record["score"][row] == one.score
                assert record.json("messages")[row] == one.messages
                del played[one.instance_id, one.repetition_id]
    assert not played


async def test_rollout_errors_are_no_rows(bridge, make_consumer):
    consumer = make_consumer()

    async def play(episode, data):
        await three_turns(episode, data)
        if data == "1" and episode.repetition_id == 2:
            raise RuntimeError("the environment broke")

    async with rolling(bridge, server(), group_size=4, concurrency=2) as rollout:
        assert await rollout.run(tasks(3), play) == 3
        assert rollout.losses.episodes == {"RuntimeError": 1}
        assert not rollout.failed
    played = {}
    for _ in range(3):
        with consumer.get(timeout_s=5) as record:
            played[record["instance_id"][0]] = record["repetition_id"].tolist()
    assert played == {"task-0": [0, 1, 2, 3], "task-1": [0, 1, 3], "task-2": [0, 1, 2, 3]}
    assert not consumer.poll()


class TimedOut(BaseException):
    """As func_timeout's, which no `except Exception` catches."""


@pytest.mark.parametrize("error", [asyncio.CancelledError("its own"), TimedOut("late")], ids=repr)
async def test_rollout_errors_beside_exception_are_no_rows_either(bridge, make_consumer, error):
    consumer = make_consumer()

    async def play(episode, data):
        episode.score = 0.0
        await episode.sample()
        if data == "1" and episode.repetition_id == 2:
            raise error

    async with rolling(bridge, server(), group_size=4, concurrency=2) as rollout:
        assert await rollout.run(tasks(3), play) == 3
        assert rollout.losses.episodes == {"RuntimeError": 1}
    assert sorted(len(record) for record in consumer.poll()) == [3, 4, 4]


async def test_rollout_a_stage_that_cancels_itself_has_failed(bridge):
    async def stage(group):
        raise asyncio.CancelledError("a timeout of its own")

    async with rolling(bridge, server(), group_size=2, stages=[stage]) as rollout:
        assert await rollout.run(tasks(2), three_turns) == 0
        assert rollout.failed == {"RuntimeError": 2}
        assert rollout.losses.episodes == {"RuntimeError": 4}


async def test_rollout_ends_after_failures_in_a_row(bridge):
    async def play(episode, data):
        raise KeyError(data)

    async with (
        serving(server()) as served,
        Rollout(bridge, served.url, byte_tokenizer(), concurrency=1, stop_after_failures=3) as rollout,
    ):
        with pytest.raises(TooManyFailures, match="groups failed 3 times in a row") as failed:
            await rollout.run(tasks(9), play)
        assert isinstance(failed.value.__cause__, KeyError)
        assert rollout.failed == {"KeyError": 3}


async def test_rollout_episodes_without_a_score_are_refused(bridge):
    async def play(episode, data):
        await episode.sample()

    async with rolling(bridge, server(), stop_after_failures=1) as rollout:
        with pytest.raises(TooManyFailures, match="has the score None"):
            await rollout.run(tasks(1), play)


async def test_rollout_server_without_tokens_is_refused_unless_allowed(bridge, make_consumer):
    consumer = make_consumer()

    async def play(episode, data):
        await episode.sample()
        episode.score = 1.0

    plain = ScriptedServer(
        byte_tokenizer(),
        lambda prompt: "yes",
        owner="someone",
        without=["token_ids", "/inference/v1/generate"],
    )
    async with serving(plain) as served:
        async with Rollout(bridge, served.url, byte_tokenizer(), stop_after_failures=1) as rollout:
            with pytest.raises(TooManyFailures) as failed:
                await rollout.run(tasks(1), play)
            assert isinstance(failed.value.__cause__, NoTokens)
        async with Rollout(
            bridge, served.url, byte_tokenizer(), group_size=2, allow_retokenise=True
        ) as rollout:
            assert await rollout.run(tasks(1), play) == 1
    with consumer.get(timeout_s=5) as record:
        assert "inference_logprobs" not in record
        assert record.json("extra") == {"retokenised": [0, 1]}
        assert byte_tokenizer().decode(record["tokens"][0]).endswith("<|assistant|>yes<|end|>")


async def test_rollout_ends_when_the_bridge_drains(bridge, make_consumer):
    consumer = make_consumer()

    async def play(episode, data):
        await episode.sample(max_tokens=1)
        episode.score = 0.0

    async def drain():
        async for _ in consumer:
            if consumer.stats()["records_total"] >= 5:
                await asyncio.to_thread(consumer.drain)

    async with rolling(bridge, server(), group_size=1, concurrency=1) as rollout:
        draining = asyncio.create_task(drain())
        put = await asyncio.wait_for(rollout.run(tasks(100_000), play), 60)
        assert 5 <= put < 100_000
        await draining


async def test_rollout_stages_change_a_group_before_it_is_put(bridge, make_consumer):
    consumer = make_consumer()

    async def doubled(group):
        return {**group, "raw_score": group["score"], "score": [2 * each for each in group["score"]]}

    async with serving(server()) as served:
        options = {"stages": [doubled], "env_metrics": lambda episodes: {"rows": len(episodes)}}
        async with Rollout(bridge, served.url, byte_tokenizer(), group_size=2, **options) as rollout:
            await rollout.run(tasks(1), three_turns)
    with consumer.get(timeout_s=5) as record:
        assert (record["score"] == 2 * record["raw_score"]).all()
        assert record["raw_score"].min() > 0
        assert record.to_scored_data()["env_metrics"] == {"rows": 2}


def test_rollout_arguments_are_checked(bridge):
    with pytest.raises(ValueError, match="group_size=0"):
        Rollout(bridge, "http://127.0.0.1:1", byte_tokenizer(), group_size=0)
