"""A real environment against the real policy server: rewards, ends, tokens and log-probabilities at the
consumer equal what the environment returned and the server sampled; 16 episodes at once; what puts cost.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmbridge
from shmbridge.producers.rollout import ChatFormat, HttpServer, Message, Rollout, Sampled, Sampling
from shmbridge.producers.skyrl_gym import SkyRLPlay, SkyRLTasks

pytestmark = pytest.mark.timeout(600)

TURNS = 4


class Listening:
    """The policy server, and what it was asked and sampled."""

    def __init__(self, url: str) -> None:
        self._http = HttpServer(url)
        self.heard: dict[tuple[int, ...], list[Sampled]] = {}  # of a prompt: episodes may share one

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, messages: Sequence[Message] = ()
    ) -> Sampled:
        sampled = await self._http.sample(prompt, sampling, messages)
        self.heard.setdefault(tuple(prompt), []).append(sampled)
        return sampled

    async def close(self) -> None:
        await self._http.close()


class Puts:
    """Adds up how long a rollout's puts take."""

    def __init__(self, rollout: Rollout) -> None:
        self.seconds = 0.0
        self._put = rollout.producer.put_async
        rollout.producer.put_async = self  # type: ignore[method-assign, assignment]

    async def __call__(self, group: Any, **options: Any) -> int | None:
        began = time.perf_counter()
        try:
            return await self._put(group, **options)
        finally:
            self.seconds += time.perf_counter() - began


async def test_sixteen_episodes_arrive_as_they_were_played(
    bridge: str, consumer: shmbridge.Consumer, tiny: Path, policy_server: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    rows = [
        {
            "prompt": [{"role": "user", "content": f">{number:02}"}],
            "env_class": "counting",
            "uid": str(number),
            "max_turns": TURNS,
            "log": str(log),
        }
        for number in range(12)
    ]
    server, play, chat = Listening(policy_server), SkyRLPlay(), ChatFormat(str(tiny))
    rollout = Rollout(
        bridge,
        server,
        chat,
        env_name="counting",
        sampling=Sampling(max_tokens=8),
        group_size=4,
        concurrency=4,
        context=120,
        env_metrics=play.env_metrics,
        lane_bytes="4M",
    )
    puts = Puts(rollout)
    async with rollout:
        began = time.perf_counter()
        assert await rollout.run(SkyRLTasks(rows).repeated(epochs=1), play) == 12
        wall_s = time.perf_counter() - began
    await server.close()
    share = puts.seconds / wall_s
    print(f"\n48 episodes of {TURNS} turns in {wall_s:.2f} s, puts {puts.seconds * 1000:.1f} ms: {share:.2%}")
    assert share < 0.01

    noted: dict[str, list[dict[str, Any]]] = {}
    for line in log.read_text().splitlines():
        episode = json.loads(line)
        noted.setdefault(episode["uid"], []).append(episode)
    steps = 0
    for _ in range(12):
        with consumer.get(5) as record:
            assert len(record) == 4
            assert record.json("extra")["env_metrics"]["reasoning_traces"] == [None] * 4
            for row, uid in enumerate(record["instance_id"]):
                dialogue = record.json("messages")[row]
                answers = [each["content"] for each in dialogue if each["role"] == "assistant"]
                episode = next(each for each in noted[uid] if each["actions"] == answers)
                noted[uid].remove(episode)
                rewards = record["step_rewards"][row]
                assert rewards.tolist() == np.float32(episode["rewards"]).tolist()
                assert record["score"][row] == pytest.approx(sum(episode["rewards"]))
                check_row(chat, server, record, row, dialogue)
                assert record.json("extra")["env_metrics"]["metrics"][row]["turns"] == TURNS
                steps += len(rewards)
    assert steps == 12 * 4 * TURNS
    assert not any(noted.values())
    assert not any(server.heard.values())  # every completion is in a row, once


def check_row(
    chat: ChatFormat, server: Listening, record: Any, row: int, dialogue: list[dict[str, Any]]
) -> None:
    """Each turn's prompt is the row so far and the observation; what follows is what the server sampled."""
    tokens = record["tokens"][row].tolist()
    mask = record["loss_mask"][row]
    end = 0
    for turn, next_end in enumerate(record["step_ends"][row].tolist()):
        prompt, sampled = next(
            (prompt, each)
            for prompt, sampled in server.heard.items()
            for each in sampled
            if list(prompt) == tokens[: len(prompt)]
            and len(prompt) + len(each.token_ids) == next_end
            and tokens[len(prompt) : next_end] == each.token_ids
            and record["inference_logprobs"][row][len(prompt) : next_end].tolist()
            == np.float32(each.logprobs).tolist()
        )
        server.heard[prompt].remove(sampled)
        begin = len(prompt)
        if turn == 0:
            assert tokens[:begin] == chat.prompt(dialogue[:2])
        else:
            observation = [dialogue[2 * turn + 1]]
            assert tokens[end:begin] == chat.following([tokens[end - 1]], observation)
        assert not mask[end:begin].any()
        assert mask[begin:next_end].all()
        assert record["token_versions"][row][begin:next_end].tolist() == sampled.versions
        end = next_end
    assert end == len(tokens)


async def test_the_pages_example_runs(
    bridge: str, consumer: shmbridge.Consumer, tiny: Path, policy_server: str, tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    row = {"prompt": [{"role": "user", "content": ">1"}], "reward_spec": {"ground_truth": "2"}}
    data.write_text(json.dumps(row) + "\n")
    page = Path(__file__).parents[3] / "docs" / "how-to" / "skyrl-gym.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), scope)
    put, failed = await scope["main"](bridge, policy_server, str(tiny), str(data))
    assert (put, failed) == (1, {})
    with consumer.get(5) as record:
        assert len(record) == 4


def test_the_room_is_light(child_environment: dict[str, str]) -> None:
    """The room itself imports neither skyrl_gym nor atroposlib nor torch."""
    code = (
        "import sys, shmbridge.producers.skyrl_gym; "
        "heavy = ('skyrl_gym', 'atroposlib', 'torch', 'transformers', 'pandas'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=child_environment
    )
    assert done.stdout.strip() == "[]"
