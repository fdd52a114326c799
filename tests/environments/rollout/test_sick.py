"""Sick environments: an episode that fails, hangs, is aborted or comes too late costs its own row."""

import asyncio
import linecache
import random
import sys

import pytest

from shmbridge.producers.rollout import Limits, NothingCame, Rollout, Sampled, TooManyFailures
from tests.environments.byte_tokenizer import byte_tokenizer
from tests.environments.rollout.test_rollout import tasks


class Server:
    """Answers at once, after as many aborted answers as wanted, with a version that may be raised."""

    def __init__(self, aborts: int = 0) -> None:
        self.aborts, self.version = aborts, 0

    async def sample(self, prompt, sampling, messages):
        await asyncio.sleep(0)
        if self.aborts > 0:
            self.aborts -= 1
            return Sampled([], None, [], "abort")
        return Sampled([97, 98], [-1.0, float("nan")], [self.version] * 2, "stop")


def rollout_on(bridge, server=None, **options):
    return Rollout(bridge, server or Server(), byte_tokenizer(), lane_bytes="16M", **options)


async def answer(episode, data) -> None:
    await episode.sample()
    episode.score = float(episode.repetition_id)


def rows_of(consumer, groups: int) -> list[list[int]]:
    rows = []
    for _ in range(groups):
        with consumer.get(timeout_s=5) as record:
            rows.append(record["repetition_id"].tolist())
            assert record.meta.group_size == len(record)
    return rows


async def test_failing_episodes_cost_their_rows_only(bridge, make_consumer):
    """5 % of the episodes fail at random: at least 94 % of those begun arrive, as groups of the rest."""
    consumer, chance, begun = make_consumer(), random.Random(3), 0

    async def play(episode, data):
        nonlocal begun
        begun += 1
        await answer(episode, data)
        if chance.random() < 0.05:
            raise RuntimeError("broke")

    async with rollout_on(bridge) as rollout:
        assert await rollout.run(tasks(100), play) == 100
        lost = rollout.losses.episodes["RuntimeError"]
    rows = rows_of(consumer, 100)
    # of the lanes that the consumer has seen: it looks for new ones when it takes, or twice a second
    assert consumer.stats()["episodes_lost_total{failed}"] == lost
    assert sum(map(len, rows)) == begun - lost == 800 - lost
    assert (begun - lost) / begun >= 0.94


@pytest.mark.parametrize("how", ["component", "extra", "exit"])
async def test_what_no_lane_takes_costs_its_row_and_so_does_an_exit(bridge, make_consumer, how):
    consumer = make_consumer()

    async def play(episode, data):
        await answer(episode, data)
        if episode.repetition_id == 1:
            if how == "exit":
                sys.exit(4)
            where = episode.components if how == "component" else episode.extra
            where["odd"] = float("nan")

    async with rollout_on(bridge, group_size=3) as rollout:
        assert await rollout.run(tasks(4), play) == 4
        assert rollout.losses.episodes.total() == 4
    assert rows_of(consumer, 4) == [[0, 2]] * 4


async def test_a_stage_that_hangs_ends_at_the_groups_deadline(bridge):
    async def hangs(group):
        await asyncio.Event().wait()

    limits = Limits(group_s=0.3)
    async with rollout_on(bridge, group_size=2, stages=[hangs], limits=limits) as rollout:
        assert await asyncio.wait_for(rollout.run(tasks(3), answer), 20) == 0
        assert rollout.failed == {"late": 3}
        assert rollout.losses.episodes == {"late": 6}


async def test_a_hung_episode_ends_at_its_deadline(bridge, make_consumer, caplog):
    consumer = make_consumer()

    async def play(episode, data):
        await answer(episode, data)
        if episode.repetition_id == 1:
            await asyncio.Event().wait()

    limits = Limits(episode_s=0.3)
    async with rollout_on(bridge, group_size=5, concurrency=4, limits=limits) as rollout:
        assert await asyncio.wait_for(rollout.run(tasks(12), play), 20) == 12
        assert rollout.losses.episodes == {"late": 12}
        assert rollout.stats()["episodes_lost_total{late}"] == 12
    assert rows_of(consumer, 12) == [[0, 2, 3, 4]] * 12
    assert "did not end within 0.3 s" in caplog.text


async def test_a_groups_deadline_ends_what_ignores_its_own(bridge, make_consumer):
    consumer = make_consumer()

    async def play(episode, data):
        await answer(episode, data)
        while episode.repetition_id == 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if episode.extra.setdefault("cancelled", 0) >= 1:
                    raise
                episode.extra["cancelled"] += 1  # swallows the first

    limits = Limits(episode_s=0.1, group_s=0.5)
    async with rollout_on(bridge, group_size=3, limits=limits) as rollout:
        assert await asyncio.wait_for(rollout.run(tasks(1), play), 20) == 1
        assert rollout.losses.episodes == {"late": 1}
    assert rows_of(consumer, 1) == [[0, 1]]


async def test_lost_episodes_are_played_again_up_to_a_limit(bridge, make_consumer):
    consumer, seen = make_consumer(), []

    async def play(episode, data):
        seen.append(episode.repetition_id)
        await answer(episode, data)
        if episode.repetition_id in (0, 2, 4):
            raise ValueError("broke")

    async with rollout_on(bridge, group_size=4, limits=Limits(refill=2)) as rollout:
        assert await rollout.run(tasks(1), play) == 1
        assert (rollout.losses.refilled, rollout.losses.episodes["ValueError"]) == (2, 3)
    assert rows_of(consumer, 1) == [[1, 3, 5]]
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]


async def test_an_incomplete_group_may_be_left_out(bridge, make_consumer):
    consumer = make_consumer()

    async def play(episode, data):
        await answer(episode, data)
        if data == "1" and episode.repetition_id == 0:
            raise KeyError(data)

    async with rollout_on(bridge, group_size=3, limits=Limits(incomplete="drop")) as rollout:
        assert await rollout.run(tasks(3), play) == 2
        assert rollout.losses.groups == {"KeyError": 1}
        assert rollout.losses.episodes == {"KeyError": 1, "EpisodesLost": 2}  # its siblings, too
        assert "1 episodes KeyError" in rollout.summary()
        assert rollout.producer.stats()["episodes_lost_total{failed}"] == 3
    assert rows_of(consumer, 2) == [[0, 1, 2]] * 2


async def test_failures_of_one_moment_count_once(bridge):
    """Eight groups in the making fail together, as when a server ends: that is one failure, not eight."""
    calls = 0

    async def play(episode, data):
        nonlocal calls
        calls += 1
        if calls <= 8:
            await asyncio.sleep(0.05)
            raise ConnectionError("the server ended")
        await answer(episode, data)

    options = {"group_size": 1, "concurrency": 8, "stop_after_failures": 3}
    async with rollout_on(bridge, **options) as rollout:
        assert await rollout.run(tasks(20), play) == 12
    calls = -(1 << 30)
    async with rollout_on(bridge, **options) as rollout:
        with pytest.raises(TooManyFailures, match="groups failed 3 times in a row"):
            await rollout.run(tasks(100), play)
        assert 3 <= rollout.losses.groups.total() <= 24


async def test_an_answer_aborted_before_its_first_token_is_asked_again(bridge, make_consumer):
    consumer = make_consumer()
    async with rollout_on(bridge, Server(aborts=8), group_size=1) as rollout:
        assert await rollout.run(tasks(10), answer) == 10
        assert rollout.losses.asked_again == 8
        assert not rollout.losses.episodes
    assert rows_of(consumer, 10) == [[0]] * 10


async def test_a_group_that_would_be_too_old_is_given_up(bridge, make_consumer):
    """Its ticket comes back, so that another group is begun under the new version."""
    consumer = make_consumer(max_off_policy_steps=0, groups_per_step=1, policy="oldest")
    consumer.publish_policy_version(0)
    started, server = asyncio.Event(), Server()

    async def play(episode, data):
        await answer(episode, data)
        if data == "0":
            started.set()
            await asyncio.Event().wait()

    async def updated():
        await started.wait()
        server.version = 1
        consumer.publish_policy_version(1)

    options = {"group_size": 2, "concurrency": 1, "max_staleness": 0, "tickets": True}
    async with rollout_on(bridge, server, **options) as rollout:
        updating = asyncio.create_task(updated())
        assert await asyncio.wait_for(rollout.run(tasks(2), play), 20) == 1
        await updating
        assert rollout.losses.episodes == {"too_old": 2}
        assert rollout.producer.stats()["episodes_lost_total{too_old}"] == 2
    assert rows_of(consumer, 1) == [[0, 1]]


async def test_nothing_came_ends_a_run_only_if_asked_to(bridge):
    async def play(episode, data):
        await asyncio.Event().wait()

    async with rollout_on(bridge, stop_after_idle_s=0.5) as rollout:
        with pytest.raises(NothingCame, match="no group was finished"):
            await rollout.run(tasks(2), play)
    async with rollout_on(bridge) as rollout:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rollout.run(tasks(2), play), 1.0)


@pytest.mark.parametrize("wrong", [{"episode_s": 0}, {"group_s": -1}, {"refill": -1}, {"incomplete": "x"}])
def test_limits_are_checked(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        Limits(**wrong)


async def test_a_rollout_without_a_position_runs_again_from_the_first_task(bridge, make_consumer):
    make_consumer()
    async with rollout_on(bridge, group_size=1) as rollout:
        assert [await rollout.run(tasks(3), answer) for _ in range(2)] == [3, 3]


async def test_a_restarted_rollout_neither_skips_nor_repeats(bridge, make_consumer, tmp_path):
    """Stopped at random moments, cancelled in the middle of groups, each task is put exactly once."""
    consumer, chance, file = make_consumer(), random.Random(7), tmp_path / "position.json"

    async def play(episode, data):
        await asyncio.sleep(chance.random() * 0.01)
        await answer(episode, data)

    found = []
    for _ in range(200):
        async with rollout_on(bridge, group_size=1, concurrency=5, resume=file) as rollout:
            running = asyncio.create_task(rollout.run(tasks(60), play))
            stop_s = chance.random() * 0.05
            done, _ = await asyncio.wait([running], timeout=stop_s)
            running.cancel()
            await asyncio.wait([running])
        for record in consumer.poll():
            with record:
                found.append(record["instance_id"][0])
        if done:
            break
    assert sorted(found) == sorted(f"task-{number}" for number in range(60))


async def test_a_cancellation_between_two_lines_of_asyncio_costs_nothing(bridge, make_consumer):
    """Ctrl-C cancels from a signal handler: here, where asyncio has looked at a future and sets it next."""
    make_consumer()
    said, hits = [], 0
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))

    def line(frame, event, _):
        nonlocal hits
        if event == "line" and "waiter.set_result" in linecache.getline(
            frame.f_code.co_filename, frame.f_lineno
        ):
            hits += running.cancel()
            sys.settrace(None)
        return line

    async def play(episode, data):
        await answer(episode, data)

    async with rollout_on(bridge) as rollout:
        running = asyncio.create_task(rollout.run(tasks(100), play))
        before = sys.gettrace()
        sys.settrace(lambda frame, *_: line if frame.f_code.co_name == "_on_completion" else None)
        try:
            with pytest.raises(asyncio.CancelledError):
                await running
        finally:
            sys.settrace(before)
    assert hits == 1
    assert said == []
