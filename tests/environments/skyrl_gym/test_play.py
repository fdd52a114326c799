"""Episodes of real SkyRL-Gym environments through a lane: what the consumer gets is what they returned and
the server sampled, step by step and token by token; what fails is no row.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import deregister, register
from skyrl_rows import task
from skyrl_scripted import Scripted

import shmbridge
from shmbridge.producers.rollout import CallThreads, Limits, Rollout, TooManyFailures
from shmbridge.producers.skyrl_gym import SkyRLPlay, SkyRLTasks, TagPair
from shmbridge.producers.skyrl_gym.environments import HeldEnv
from shmbridge.testing import wait_until

GSM8K = {
    "prompt": [{"role": "user", "content": "3 + 4?"}],
    "env_class": "gsm8k_multi_turn",
    "reward_spec": {"ground_truth": "7"},
    "extra_info": {"max_turns": 3},
}


@pytest.fixture
def registered() -> Iterator[Callable[[type], dict[str, Any]]]:
    """Registers an environment class for this test; returns a row for it."""
    names = []

    def make(kind: type, **extras: Any) -> dict[str, Any]:
        names.append(f"test-{kind.__name__}")
        register(id=names[-1], entry_point=kind)
        return {"prompt": [{"role": "user", "content": "?"}], "env_class": names[-1], **extras}

    yield make
    for name in names:
        deregister(name)


async def run(
    bridge: str, server: Scripted, rows: list[dict[str, Any]], play: SkyRLPlay | None = None, **options: Any
) -> Rollout:
    """Plays each row once and returns the rollout, closed."""
    play = play or SkyRLPlay()
    options = {"group_size": 2, "lane_bytes": "1M", "concurrency": 4} | options
    async with Rollout(bridge, server, server.tokenizer, env_metrics=play.env_metrics, **options) as rollout:
        await rollout.run(SkyRLTasks(rows).repeated(epochs=1), play)
    return rollout


async def test_gsm8k_in_several_turns(bridge: str, consumer: shmbridge.Consumer, pieces: Any) -> None:
    """The package's own environment: right at the first try, at the second, well-formed and wrong, never."""
    said = {
        "0": ["<think>easy</think>#### 7"],
        "1": ["#### 8", "<think>oh</think> no, <think>sure</think> #### 7"],
        "2": ["#### 6", "#### 5", "#### 4"],
        "3": ["?", "?", "<think>it is"],
    }

    def answer(prompt: str, number: int) -> str:
        kind = prompt.split("<|user|>")[1][0]
        return said[kind][prompt.count("<|assistant|>") - 1]

    server = Scripted(pieces, answer)
    rows = [GSM8K | {"prompt": [{"role": "user", "content": f"{number}: 3 + 4?"}]} for number in range(4)]
    await run(bridge, server, rows, group_size=1, concurrency=1)
    rewards = {"0": [1.0], "1": [0.2 / 3, 1.0], "2": [0.2 / 3] * 3, "3": [0.0, 0.0, 0.0]}
    traces = {"0": "easy", "1": "oh\n\nsure", "2": None, "3": "it is"}
    asked = iter(server.asked)
    for kind in said:
        with consumer.get(5) as record:
            tokens = record["tokens"][0].tolist()
            np.testing.assert_allclose(record["step_rewards"][0], rewards[kind], rtol=1e-6)
            assert record["score"].tolist() == pytest.approx([sum(rewards[kind])])
            ends = record["step_ends"][0].tolist()
            assert ends == record["turn_ends"][0].tolist()
            for end in ends:
                prompt, sampled, logprobs = next(asked)
                begin = len(prompt)
                assert tokens[:begin] == prompt  # what the server got is the row so far, and the observation
                assert tokens[begin:end] == sampled
                assert record["inference_logprobs"][0][begin:end].tolist() == logprobs
                assert record["loss_mask"][0][begin:end].all()
            assert len(tokens) == ends[-1]
            assert record["loss_mask"][0].sum() == sum(
                len(pieces.encode(text, add_special_tokens=False)) + 1 for text in said[kind]
            )
            assert record["token_versions"][0][record["loss_mask"][0] == 1].tolist() == [7] * int(
                record["loss_mask"][0].sum()
            )
            metrics = record.json("extra")["env_metrics"]
            assert metrics["reasoning_traces"] == [traces[kind]]
            assert metrics["metrics"] == [{"steps": len(said[kind])}]
            assert metrics["prm_supported"] is True
            assert record.to_scored_data()["env_metrics"] == metrics
            spans = record["trace_spans"][0].tolist() if "trace_spans" in record else []
            assert spans == [at for each in metrics["traces"][0] for at in (each["begin"], each["end"])]
            assert [each["closed"] for each in metrics["traces"][0]] == [kind != "3"] * (len(spans) // 2)
            assert (record["instance_id"], record["repetition_id"].tolist()) == ([kind], [0])
            dialogue = [message["role"] for message in record.json("messages")[0]]
            assert dialogue == ["user", *["assistant", "user"] * (len(ends) - 1), "assistant"]


async def test_a_group_of_which_only_some_reasoned(
    bridge: str, consumer: shmbridge.Consumer, pieces: Any
) -> None:
    server = Scripted(pieces, lambda prompt, number: "<think>a</think>1" if number % 3 == 1 else "1")
    await run(bridge, server, [task(max_turns=1)], group_size=6)
    with consumer.get(5) as record:
        metrics = record.json("extra")["env_metrics"]
        assert len(metrics["reasoning_traces"]) == 6
        for row, trace in enumerate(metrics["reasoning_traces"]):
            text = pieces.decode(record["tokens"][row].tolist())
            assert trace == ("a" if "<think>" in text else None)
            assert len(record["trace_spans"][row]) == (2 if trace else 0)
        assert metrics["reasoning_traces"].count("a") == 2
        assert record["repetition_id"].tolist() == list(range(6))


async def test_sixteen_episodes_at_once(
    bridge: str, make_consumer: Callable[..., shmbridge.Consumer], pieces: Any, registered: Any
) -> None:
    """All of them are in their environments at one time, which only threads of their own allow."""
    together = threading.Barrier(16, timeout=20)

    class Meeting(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()

        def step(self, action: str) -> Any:
            together.wait()
            return {"observations": [], "reward": 1, "done": True, "metadata": {}}

    server = Scripted(pieces, lambda prompt, number: "hello")
    rows = [registered(Meeting)] * 4
    rollout = await run(bridge, server, rows, group_size=4)
    assert not rollout.failed
    assert len(make_consumer().poll()) == 4


async def test_an_answer_is_cut_where_the_environment_cuts_it(
    bridge: str, consumer: shmbridge.Consumer, pieces: Any, registered: Any
) -> None:
    class Cutting(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()

        def step(self, action: str) -> Any:
            self.turns += 1
            answer = action.split("</call>")[0] + "</call>" if "</call>" in action else action
            more = [{"role": "user", "content": "result"}]
            step = {"observations": more, "reward": self.turns, "done": self.turns == 2, "metadata": {}}
            return step | {"postprocessed_action": answer}

    server = Scripted(
        pieces, lambda prompt, number: "<call>f</call> and I imagine" if number == 0 else "done"
    )
    await run(bridge, server, [registered(Cutting)], group_size=1)
    kept = pieces.encode("<call>f</call>", add_special_tokens=False)
    (first, sampled, logprobs), (second, last, _) = server.asked
    assert sampled[: len(kept)] == kept
    with consumer.get(5) as record:
        tokens = record["tokens"][0].tolist()
        end = len(first) + len(kept)
        assert tokens[:end] == first + kept
        assert tokens[: len(second)] == second
        assert tokens[len(second) :] == last  # end token included: nothing was cut there
        assert record["step_ends"][0].tolist() == [end, len(tokens)]
        assert record["step_rewards"][0].tolist() == [1.0, 2.0]
        assert record["inference_logprobs"][0][len(first) : end].tolist() == logprobs[: len(kept)]
        assert pieces.decode(tokens[end : len(second)]) == "<|end|>\n<|user|>result<|end|>\n<|assistant|>"
        assert record.json("messages")[0][1]["content"] == "<call>f</call>"


BROKEN = {
    "raises": (lambda: 1 / 0, "step of .*ZeroDivisionError: division by zero"),
    "leaves": (lambda: exec("raise SystemExit(3)"), "SystemExit: 3"),
    "nothing": (lambda: None, "step returned None, not observations, reward and done"),
    "no reward": (lambda: {"observations": [], "done": True}, "not observations, reward and done"),
    "a reward of None": (
        lambda: {"observations": [], "done": True, "reward": None},
        "the reward None is no number",
    ),
    "nan": (lambda: {"observations": [], "done": True, "reward": float("nan")}, "the reward is nan"),
    "text": (lambda: {"observations": "text", "done": False, "reward": 1}, "'text' is no list of messages"),
    "another answer": (
        lambda: {"observations": [], "done": True, "reward": 1, "postprocessed_action": "never said"},
        "postprocessed_action of .* was never sampled",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_an_environment_that_fails_is_no_row(
    bridge: str,
    consumer: shmbridge.Consumer,
    pieces: Any,
    registered: Any,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    """Three of four episodes of the group are in order and are put; the other one's environment is closed."""
    does, said = BROKEN[case]
    made, closed = [], []

    class Breaking(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()
            made.append(self)

        def step(self, action: str) -> Any:
            if action == "3":
                return does()
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

        def close(self) -> None:
            closed.append(self)

    server = Scripted(pieces, lambda prompt, number: str(number))
    play = SkyRLPlay()
    async with Rollout(
        bridge, server, pieces, group_size=4, env_metrics=play.env_metrics, lane_bytes="1M"
    ) as rollout:
        rows = [registered(Breaking), task(max_turns=1)]
        tasks = SkyRLTasks(rows)
        assert await rollout.run([tasks[0], tasks[1]], play) == 2
        assert rollout.losses.episodes == {"EnvironmentFailed": 1}
    assert re.search(said, caplog.text)
    assert "SB513" in caplog.text
    until = time.monotonic() + 5
    while len(closed) < len(made) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert sorted(map(id, closed)) == sorted(map(id, made))
    assert len(made) >= 2
    rows = {record["instance_id"][0]: record["repetition_id"].tolist() for record in consumer.poll()}
    assert rows == {"0": [0, 1, 2], "1": [0, 1, 2, 3]}


async def test_missing_extras_surface(bridge: str, pieces: Any) -> None:
    """What an environment asserts of its row is its own; it ends the run when it goes on."""
    row = {key: value for key, value in GSM8K.items() if key != "reward_spec"}
    server = Scripted(pieces, lambda prompt, number: "?")
    with pytest.raises(TooManyFailures, match=r"reward_spec\.ground_truth is required"):
        await run(bridge, server, [row] * 8, concurrency=1)
    assert server.asked == []


@pytest.mark.parametrize("what", ["__init__", "init", "get_metrics", "close"])
async def test_errors_around_the_steps_surface_too(
    bridge: str, pieces: Any, registered: Any, what: str
) -> None:
    closed = []

    class Odd(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()
            if what == "__init__":
                raise OSError("no database")

        def step(self, action: str) -> Any:
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

        def close(self) -> None:
            closed.append(self)

    def fails(*_: Any) -> None:
        closed.append(None) if what == "close" else None
        raise OSError("no database")

    if what != "__init__":
        setattr(Odd, what, fails)
    server = Scripted(pieces, lambda prompt, number: "?")
    rollout = await run(bridge, server, [registered(Odd)], group_size=1)
    assert rollout.failed == {"EnvironmentFailed": 1}
    await asyncio.sleep(0.1)
    assert len(closed) == (0 if what == "__init__" else 1)


async def test_a_cancelled_episode_closes_its_environment_after_the_step(
    bridge: str, pieces: Any, registered: Any
) -> None:
    """Never beside a call that runs."""
    order, inside, may_go = [], threading.Event(), threading.Event()

    class Slow(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()

        def step(self, action: str) -> Any:
            inside.set()
            may_go.wait(20)
            order.append("stepped")
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

        def close(self) -> None:
            order.append("closed")

    server = Scripted(pieces, lambda prompt, number: "?")
    running = asyncio.create_task(run(bridge, server, [registered(Slow)], group_size=1))
    await asyncio.to_thread(inside.wait, 20)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(running, 10)
    assert order == []
    may_go.set()
    until = time.monotonic() + 5
    while len(order) < 2 and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert order == ["stepped", "closed"]


async def test_cancelling_a_close_that_waits_for_a_thread_closes_all_the_same() -> None:
    closed, may_go = [], threading.Event()

    class Quiet(BaseTextEnv):
        def close(self) -> None:
            closed.append(self)

    threads = CallThreads(1, "quiet")
    env = HeldEnv(Quiet, "quiet", threads)
    await env.init([{"role": "user", "content": "?"}])
    threads.submit(may_go.wait, 20)
    closing = asyncio.create_task(env.close())
    await asyncio.sleep(0.05)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    assert closed == []
    may_go.set()
    await asyncio.to_thread(wait_until, lambda: len(closed) == 1)


async def test_environments_that_hang_leave_their_threads_to_others(
    bridge: str, consumer: shmbridge.Consumer, pieces: Any, registered: Any
) -> None:
    """More of them than there are threads; the others' episodes are played all the same."""
    may_go, closed = threading.Event(), []

    class Hangs(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()

        def step(self, action: str) -> Any:
            if action == "1":
                may_go.wait(60)
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

        def close(self) -> None:
            closed.append(self)

    server, play = Scripted(pieces, lambda prompt, number: str(number % 2)), SkyRLPlay(threads=3)
    limits = Limits(episode_s=0.5)
    try:
        async with Rollout(bridge, server, pieces, group_size=4, concurrency=1, limits=limits) as rollout:
            tasks = SkyRLTasks([registered(Hangs)]).repeated(epochs=6)
            assert await asyncio.wait_for(rollout.run(tasks, play), 60) == 6
            assert rollout.losses.episodes == {"late": 12}
    finally:
        may_go.set()
    assert [len(record) for record in consumer.poll()] == [2] * 6
    await asyncio.to_thread(wait_until, lambda: len(closed) == 24)


async def test_where_the_context_is_full_the_episode_ends_with_the_rewards_so_far(
    bridge: str, consumer: shmbridge.Consumer, pieces: Any
) -> None:
    server = Scripted(pieces, lambda prompt, number: "12345")
    await run(bridge, server, [task(max_turns=50)], context=60)
    with consumer.get(5) as record:
        assert record["finish_reason"].tolist() == [1, 1]
        for row in range(2):
            steps = len(record["step_ends"][row])
            assert 1 < steps < 50
            assert record["step_ends"][row][-1] == len(record["tokens"][row]) <= 60
            full, cut = [0.5] * (steps - 1), record["step_rewards"][row][-1]
            np.testing.assert_allclose(record["step_rewards"][row][:-1], full)
            assert record["score"][row] == pytest.approx(sum(full) + cut)


async def test_a_prompt_that_fills_the_context_is_no_row(bridge: str, pieces: Any) -> None:
    rollout = await run(bridge, Scripted(pieces, lambda prompt, number: "1"), [task()], context=10)
    assert rollout.failed == {"ContextFull": 1}


async def test_without_process_rewards_only_the_score_is_carried(
    bridge: str, consumer: shmbridge.Consumer, pieces: Any
) -> None:
    server = Scripted(pieces, lambda prompt, number: "123")
    await run(bridge, server, [task()], SkyRLPlay(process_rewards=False))
    with consumer.get(5) as record:
        assert "step_rewards" not in record
        assert "step_ends" not in record
        assert record["score"].tolist() == pytest.approx([0.9, 0.9])
        assert record.json("extra")["env_metrics"]["prm_supported"] is False


async def test_tags_and_turns_of_the_users_choice(
    bridge: str, consumer: shmbridge.Consumer, pieces: Any
) -> None:
    server = Scripted(pieces, lambda prompt, number: "[r]a[/r]<think>b</think>")
    play = SkyRLPlay(tags=[TagPair("[r]", "[/r]")], max_turns=2)
    await run(bridge, server, [task()], play, group_size=1)
    with consumer.get(5) as record:
        assert record.json("extra")["env_metrics"]["reasoning_traces"] == ["a\n\na"]
        assert len(record["step_ends"][0]) == 2


async def test_environments_cannot_change_each_others_tasks(
    bridge: str, pieces: Any, registered: Any
) -> None:
    seen = []

    class Greedy(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()
            seen.append(dict(extras["nested"]))
            extras["nested"]["taken"] = True

        def init(self, prompt: Any) -> Any:
            prompt[0]["content"] += "!"
            return prompt, {}

        def step(self, action: str) -> Any:
            return {"observations": [], "reward": 0, "done": True, "metadata": {}}

    row = registered(Greedy, nested={"a": 1})
    server = Scripted(pieces, lambda prompt, number: "1")
    rollout = await run(bridge, server, [row, row])
    assert not rollout.failed
    assert seen == [{"a": 1}] * 4
    assert row["prompt"] == [{"role": "user", "content": "?"}]
    assert len({tuple(prompt) for prompt, _, _ in server.asked}) == 1
