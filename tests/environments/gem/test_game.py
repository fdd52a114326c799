"""GemGame: episodes of gem environments arrive as they were played, alike in a group, or not at all."""

import asyncio
import random
import re
import threading
from itertools import islice

import gem
import numpy as np
import pytest

from shmbridge.errors import BadArgument
from shmbridge.producers.gem import AtroposGemEnv, GemGame, GroupNotAlike
from shmbridge.producers.gem.game import ProcessRandom, begin_alike
from shmbridge.producers.rollout import Limits, Rollout, TooManyFailures
from tests.environments.byte_tokenizer import byte_tokenizer

GUESS = "game:GuessTheNumber-v0-easy"


def guesses(messages):
    """Guesses upwards, from 1."""
    said = sum(message["role"] == "assistant" for message in messages)
    return f"\\boxed{{{said + 1}}}"


class Watched(gem.Env):
    """Notes what an environment was asked and gave."""

    def __init__(self, env, into):
        self.env, self.into = env, into

    def reset(self, seed=None):
        observation, info = self.env.reset(seed)
        self.into.append([("reset", seed, observation, self.env.game_number)])
        self.mine = self.into[-1]
        return observation, info

    def step(self, action):
        stepped = self.env.step(action)
        self.mine.append((action, *stepped[:4]))
        return stepped


def rollout(bridge, server, **options) -> Rollout:
    return Rollout(bridge, server, byte_tokenizer(), group_size=4, concurrency=3, **options)


async def test_game_rewards_ends_and_tokens_step_by_step(bridge, make_consumer, scripted):
    """gem's own game, beside what its environments saw: every action is the text of the trained tokens."""
    consumer, seen = make_consumer(), []
    async with (
        GemGame(lambda: Watched(gem.make(GUESS), seen), group_size=4, seed=10, suffix=True) as game,
        rollout(bridge, scripted(guesses)) as rolled,
    ):
        assert await rolled.run(islice(game.tasks(), 5), game.play) == 5
        assert not rolled.failed
    tokenizer, episodes = byte_tokenizer(), list(seen)
    for _ in range(5):
        with consumer.get(timeout_s=5) as record:
            for row in range(4):
                extra = record.json("extra")["rows"][row]
                played = next(each for each in episodes if each[0][1] == extra["seed"])
                episodes.remove(played)
                steps = played[1:]
                assert record["step_rewards"][row].tolist() == pytest.approx([step[2] for step in steps])
                assert record["score"][row] == pytest.approx(sum(step[2] for step in steps))
                assert extra["terminated"] == steps[-1][3]
                assert extra["truncated"] == steps[-1][4]
                assert record["finish_reason"][row] == 0, "the environment's end is no cut answer"
                tokens, mask = record["tokens"][row], record["loss_mask"][row]
                ends = record["step_ends"][row].tolist()
                assert ends == record["turn_ends"][row].tolist()
                for begin, end, step in zip([0, *ends], ends, steps, strict=False):
                    trained = tokens[begin:end][mask[begin:end] == 1]
                    assert tokenizer.decode(trained) == step[0] + "<|end|>"
                expected = [{"role": "user", "content": f"{played[0][2]}Enter your next guess."}]
                for step in steps:
                    expected.append({"role": "assistant", "content": step[0]})
                    expected.append({"role": "user", "content": f"{step[1]}\nEnter your next guess."})
                assert record.json("messages")[row] == expected[:-1]
                whole = tokenizer.apply_chat_template(expected[:-1], return_dict=False)
                assert tokens.tolist() == whole[:-1], "the last answer's line end was not sampled"
    assert not episodes


async def test_game_groups_begin_alike(bridge, make_consumer, scripted):
    """Also in what no observation shows: the number to be guessed. Groups differ."""
    make_consumer()
    seen = []
    async with (
        GemGame(lambda: Watched(gem.make(GUESS), seen), group_size=4) as game,
        rollout(bridge, scripted(guesses)) as rolled,
    ):
        await rolled.run(islice(game.tasks(), 12), game.play)
    numbers = {}
    for episode in seen:
        numbers.setdefault(episode[0][1], []).append(episode[0][3])
    assert sorted(numbers) == list(range(12))
    assert all(len(each) == 4 and len(set(each)) == 1 for each in numbers.values())
    assert len({each[0] for each in numbers.values()}) > 3


def test_alike_spawns_where_an_environment_can(gem_envs):
    begun = begin_alike(lambda: gem_envs.Spawned(), 4, seed=3)
    assert len({each.env.secret for each in begun}) == 1
    assert len({id(each.env) for each in begun}) == 4
    begun = begin_alike(lambda: gem_envs.Spawned(), 4, seed=3, how="reset")
    assert len({each.env.secret for each in begun}) == 4, "nothing shows that these differ"
    with pytest.raises(NotImplementedError):
        begin_alike(lambda: gem_envs.Echo(), 2, seed=3, how="spawn")
    begun = begin_alike(lambda: gem.make("rg:leg_counting", size=50), 3, seed=3)
    assert len({each.env.data["question"] for each in begun}) == 1


def test_alike_refuses_what_begins_differently(gem_envs):
    gem_envs.Echo.closed = 0
    with pytest.raises(GroupNotAlike, match="seed 3 begins with"):
        begin_alike(lambda: gem_envs.Echo(ignores_seed=True), 4, seed=3)
    assert gem_envs.Echo.closed == 2
    assert len(begin_alike(lambda: gem_envs.Echo(ignores_seed=True), 4, seed=3, allow_unequal=True)) == 4


def test_alike_leaves_the_process_its_random_numbers(gem_envs):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    begin_alike(lambda: gem_envs.Echo(), 4, seed=3)
    assert (random.random(), np.random.random()) == expected


def test_alike_nobody_draws_while_one_seeds():
    gate, inside, done = ProcessRandom(), threading.Event(), []
    with gate.shared():
        seeding = threading.Thread(target=lambda: seed(gate))

        def seed(gate):
            with gate.alone():
                inside.set()
                done.append(random.random())

        seeding.start()
        assert not inside.wait(0.05)
    seeding.join(20)
    assert inside.is_set()
    with gate.shared(), gate.shared():
        pass


async def test_game_errors_cost_their_rows(bridge, make_consumer, scripted, gem_envs):
    consumer = make_consumer()
    made = []

    def make():
        made.append(gem_envs.Echo(breaks=len(made) == 2))
        return made[-1]

    async with (
        GemGame(make, group_size=4) as game,
        Rollout(bridge, scripted(guesses), byte_tokenizer(), group_size=4, concurrency=1) as rolled,
    ):
        assert await rolled.run(islice(game.tasks(), 4), game.play) == 4
        assert rolled.losses.episodes == {"KeyError": 1}
    assert sorted(len(record) for record in consumer.poll()) == [3, 4, 4, 4]


async def test_game_lost_episodes_are_played_again_from_the_same_state(
    bridge, make_consumer, scripted, gem_envs
):
    """In an environment of their own, reset with the group's seed, and refused if it begins differently."""
    consumer, made = make_consumer(), []

    def make():
        made.append(gem_envs.Echo(breaks=len(made) == 1))
        return made[-1]

    limits = Limits(refill=3)
    async with (
        GemGame(make, group_size=4) as game,
        Rollout(bridge, scripted(guesses), byte_tokenizer(), group_size=4, limits=limits) as rolled,
    ):
        assert await rolled.run(islice(game.tasks(), 1), game.play) == 1
        assert (rolled.losses.refilled, rolled.losses.episodes) == (1, {"KeyError": 1})
    (record,) = consumer.poll()
    assert record["repetition_id"].tolist() == [0, 2, 3, 4]
    assert len({messages[0]["content"] for messages in record.json("messages")}) == 1
    with pytest.raises(GroupNotAlike):
        begin_alike(lambda: gem_envs.Echo(), 1, seed=3, like=begin_alike(gem_envs.Echo, 1, seed=4)[0])


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (SystemExit(0), "EnvFailed"),
        (StopIteration(), "EnvFailed"),
        (GeneratorExit(), "EnvFailed"),
        (None, "EnvFailed"),
        (("x", 1.0, True, {}), "EnvFailed"),
        (("x", None, True, False, {}), "BadArgument"),
        (("x", float("nan"), True, False, {}), "BadArgument"),
        ((None, 1.0, False, False, None), "BadArgument"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", ["reset", "step"])
async def test_game_no_failure_of_an_environment_ends_or_stops_the_run(
    bridge, gem_envs, scripted, failure, kind, place
):
    """An environment that calls sys.exit would end the producer, one that raises StopIteration hang it."""

    def make():
        env = gem_envs.Echo(fails_in=place)
        env.failure = failure
        return env

    async with GemGame(make, group_size=4) as game, rollout(bridge, scripted(guesses)) as rolled:
        assert await asyncio.wait_for(rolled.run(islice(game.tasks(), 2), game.play), 20) == 0
        assert rolled.failed == {"EnvFailed" if place == "reset" else kind: 2}


async def test_game_unequal_groups_end_the_run(bridge, make_consumer, scripted, gem_envs):
    consumer = make_consumer()
    options = {"env_args": {"ignores_seed": True}, "group_size": 4}
    async with (
        GemGame("test:Echo", **options) as game,
        rollout(bridge, scripted(guesses), stop_after_failures=1) as rolled,
    ):
        with pytest.raises(TooManyFailures) as failed:
            await rolled.run(islice(game.tasks(), 3), game.play)
        assert isinstance(failed.value.__cause__, GroupNotAlike)
        assert not consumer.poll()
    async with (
        GemGame("test:Echo", **options, allow_unequal=True) as game,
        rollout(bridge, scripted(guesses)) as rolled,
    ):
        assert await rolled.run(islice(game.tasks(), 3), game.play) == 3


async def test_game_finish_reason_is_the_answers(bridge, make_consumer, scripted, gem_envs):
    consumer = make_consumer()
    async with (
        GemGame("test:Echo", env_args={"turns": 9}, group_size=4, max_turns=2) as game,
        rollout(bridge, scripted(guesses, cut=True)) as rolled,
    ):
        assert await rolled.run(islice(game.tasks(), 1), game.play) == 1
    record = consumer.get(timeout_s=5)
    assert record["finish_reason"].tolist() == [1] * 4
    assert [row["max_turns"] for row in record.json("extra")["rows"]] == [True] * 4
    assert len(record["step_ends"][0]) == 2


async def test_game_full_context_ends_an_episode(bridge, make_consumer, scripted, gem_envs):
    consumer = make_consumer()
    async with (
        GemGame("test:Echo", env_args={"turns": 99}, group_size=4) as game,
        rollout(bridge, scripted(guesses), context=150) as rolled,
    ):
        assert await rolled.run(islice(game.tasks(), 1), game.play) == 1
    record = consumer.get(timeout_s=5)
    extra = record.json("extra")["rows"][0]
    assert extra["context_full"]
    assert not extra["terminated"]
    assert record["finish_reason"].tolist() == [1] * 4
    assert record["score"][0] == pytest.approx(sum(record["step_rewards"][0].tolist()))


async def test_game_cancelled_closes_its_environments(bridge, make_consumer, scripted, gem_envs):
    make_consumer()
    gem_envs.Echo.closed = 0
    made, stepping, go_on = [], threading.Event(), threading.Event()

    class Slow(gem_envs.Echo):
        def step(self, action):
            stepping.set()
            go_on.wait(20)
            return super().step(action)

    def make():
        made.append(Slow())
        return made[-1]

    async with GemGame(make, group_size=4) as game, rollout(bridge, scripted(guesses)) as rolled:
        running = asyncio.create_task(rolled.run(islice(game.tasks(), 3), game.play))
        assert await asyncio.to_thread(stepping.wait, 20)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        go_on.set()
    deadline = asyncio.get_running_loop().time() + 20
    while Slow.closed < len(made):
        assert asyncio.get_running_loop().time() < deadline, (Slow.closed, len(made))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("place", ["reset", "step"])
async def test_game_environments_that_hang_leave_their_threads_to_others(
    bridge, make_consumer, scripted, gem_envs, place
):
    """More of them than there are threads."""
    consumer, may_go, made = make_consumer(), threading.Event(), []

    class Hangs(gem_envs.Echo):
        hangs = False

        def reset(self, seed=None):
            if self.hangs and place == "reset":
                may_go.wait(60)
            return super().reset(seed)

        def step(self, action):
            if self.hangs and place == "step":
                may_go.wait(60)
            return super().step(action)

    def make():
        made.append(Hangs())
        made[-1].hangs = len(made) <= 3
        return made[-1]

    options = {"group_size": 1, "concurrency": 2, "limits": Limits(episode_s=2.0)}
    try:
        async with (
            GemGame(make, group_size=1, threads=2) as game,
            Rollout(bridge, scripted(guesses), byte_tokenizer(), **options) as rolled,
        ):
            run = rolled.run(islice(game.tasks(), 6), game.play)
            put = await asyncio.wait_for(run, 60)
            # One that hangs keeps another from seeding until it is given up, by when that one may be late.
            assert put >= 2
            assert rolled.losses.episodes == {"late": 6 - put}
    finally:
        may_go.set()
    assert len(consumer.poll()) == put


async def test_game_of_another_group_size_begins_more(bridge, make_consumer, scripted, gem_envs):
    consumer = make_consumer()
    async with GemGame("test:Echo", group_size=2) as game, rollout(bridge, scripted(guesses)) as rolled:
        assert await rolled.run(islice(game.tasks(), 1), game.play) == 1
    assert [len(record) for record in consumer.poll()] == [4]


def test_game_unknown_environment():
    with pytest.raises(BadArgument, match="gem has no environment 'nope'"):
        GemGame("nope")


@pytest.mark.parametrize("kind", ["ChatEnv", "GroupEnv"])
async def test_game_plays_atropos_environments_with_real_tokens(
    bridge, make_consumer, scripted, envs, policy_tokenizer, kind
):
    """One prompt per group; what the environment was given is what was sampled."""
    consumer, groups = make_consumer(), []

    class Kept(AtroposGemEnv):
        def step(self, action):
            stepped = super().step(action)
            if stepped[2]:
                groups.append(stepped[4]["group"])
            return stepped

    config = {"turns": 2, "score": -1.0}
    make = lambda: Kept(getattr(envs, kind), tokenizer=policy_tokenizer, config=config)  # noqa: E731
    chance = random.Random(3)
    async with (
        GemGame(make, group_size=4, alike="reset") as game,
        rollout(bridge, scripted(lambda messages: "".join(chance.choices("abc", k=3)))) as rolled,
    ):
        assert await rolled.run(islice(game.tasks(), 3), game.play) == 3
    rows = []
    for _ in range(3):
        record = consumer.get(timeout_s=5)
        assert record["score"].tolist() == [-1.0] * 4
        chats = record.json("messages")
        assert len({re.sub("[abc]+", "", chat[-4]["content"]) for chat in chats}) == 1
        for row in range(4):
            trained = record["loss_mask"][row] == 1
            logprobs = record["inference_logprobs"][row][trained].tolist()
            rows.append((record["tokens"][row][trained].tolist(), logprobs))
    if kind == "GroupEnv":
        for group in groups:
            (masks,), (logprobs,) = group["masks"], group["inference_logprobs"]
            trained = [at for at, mask in enumerate(masks) if mask != -100]
            rows.remove(([masks[at] for at in trained], [logprobs[at] for at in trained]))
        assert not rows
    assert len(groups) == 12


async def test_game_plays_siblings_of_an_atropos_environment(
    bridge, make_consumer, scripted, envs, policy_tokenizer
):
    """All four answers of a group are one group of the environment, also where all scores are equal."""
    consumer = make_consumer()
    make = lambda: AtroposGemEnv(envs.FilteredEnv, tokenizer=policy_tokenizer, group_size=4)  # noqa: E731
    chance = random.Random(3)
    async with (
        GemGame(make, group_size=4) as game,
        rollout(bridge, scripted(lambda messages: chance.choice(["right", "wrong"]))) as rolled,
    ):
        assert await rolled.run(islice(game.tasks(), 3), game.play) == 3
    for _ in range(3):
        record = consumer.get(timeout_s=5)
        scores = record["score"].tolist()
        for chat, score in zip(record.json("messages"), scores, strict=True):
            right = chat[-1]["content"] == "right"
            assert score == -1.0 or right
            assert score > 0.5 or not right
