"""verifiers' environments against the real policy server, whose weights change meanwhile: the rows at the
consumer are verifiers' own traces, and every token has the version that sampled it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.weights import WeightsWriter
from tests.environments.verifiers.conftest import HERE_ALONE, Noting, Start, following, larger, programs

pytestmark = pytest.mark.timeout(900)

SHORT: dict[str, Any] = {"group_size": 2, "sampling": {"max_tokens": 4}}  # prompts have hundreds of tokens


class Models:
    """The weights of each version: the tiny model's, a little more of them each time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._first = [each.detach().clone() for each in self._model.parameters()]

    def of(self, version: int) -> Any:
        with torch.no_grad():
            for parameter, first in zip(self._model.parameters(), self._first, strict=True):
                parameter.copy_(first * (1 + 0.02 * version))
        return self._model

    def logprobs(self, version: int, tokens: list[int]) -> Any:
        with torch.inference_mode():
            logits = self.of(version)(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logits.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


class Followed:
    """A bridge whose weights a policy server follows, for the whole file: a start costs seconds."""

    def __init__(self, bridge: str, consumer: shmbridge.Consumer, url: str, tiny: Path) -> None:
        self.bridge, self.consumer, self.url, self.tiny = bridge, consumer, url, tiny
        self.writer, self.models, self.version = WeightsWriter(bridge), Models(tiny), 0

    async def publish(self, over: asyncio.Event) -> None:
        """Publishes new weights every half a second, until `over`."""
        while not over.is_set():
            model = self.models.of(self.version)
            await asyncio.to_thread(self.writer.publish, self.version, list(model.named_parameters()))
            self.consumer.publish_policy_version(self.version)
            self.version += 1
            try:
                await asyncio.wait_for(over.wait(), 0.5)
            except TimeoutError:
                continue


@pytest.fixture(scope="module")
def followed(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, child_environment: dict[str, str]
) -> Iterator[Followed]:
    bridge = f"t-followed-{os.getpid()}-{os.urandom(2).hex()}"
    try:
        with (
            shmbridge.Consumer(bridge) as consumer,
            programs(tmp_path_factory.mktemp("followed"), child_environment) as program,
        ):
            url, _ = following(program, bridge, tiny)
            followed = Followed(bridge, consumer, url, tiny)
            with followed.writer:
                yield followed
    finally:
        report = shmbridge.clean(bridge, dry_run=False)
    assert not report.kept


async def played(
    followed: Followed, config: Any, groups: int, **how: Any
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The traces of so many groups, and the rows that arrived, while weights are published."""
    rows: list[dict[str, Any]] = []
    over = asyncio.Event()
    publishing = asyncio.create_task(followed.publish(over))
    rollout = Noting(followed.bridge, followed.url, str(followed.tiny), config, lane_bytes="16M", **how)
    async with rollout:
        assert await rollout.run(rollout.tasks(), rollout.play, groups) == groups, rollout.summary()
    over.set()
    await publishing
    assert rollout.losses.episodes == {}
    for _ in range(groups):
        with followed.consumer.get(10) as record:
            about = record.json("extra")["rows"]
            messages = record.json("messages")
            for row in range(len(record)):
                names = ("tokens", "loss_mask", "inference_logprobs", "token_versions", "turn_ends")
                found = {name: record[name][row].copy() for name in names}
                names = ("score", "instance_id", "repetition_id", "row_index", "is_last", "finish_reason")
                found |= {name: record[name][row] for name in names}
                found["components"] = dict(record["reward_components"][row])
                rows.append(found | {"about": about[row], "messages": messages[row]})
    return [trace for group in rollout.noted for run in group for trace in run.traces], rows


def check(traces: list[Any], rows: list[dict[str, Any]], models: Models) -> set[int]:
    """Each row is a branch of one of the traces, each branch a row; returns the versions that sampled."""
    branches = {(trace.id, each.index): (trace, each) for trace in traces for each in trace.branches}
    assert len(rows) == len(branches)
    versions: set[int] = set()
    for row in rows:
        trace, branch = branches.pop((row["about"]["trace"], row["about"]["branch"]))
        mask = np.array(branch.sampled_mask)
        assert row["tokens"].tolist() == branch.token_ids
        assert row["loss_mask"].tolist() == mask.astype(int).tolist()
        assert row["inference_logprobs"].tolist() == np.float32(branch.logprobs).tolist()
        assert row["score"] == trace.reward
        assert row["components"] == pytest.approx({name: each.value for name, each in trace.rewards.items()})
        assert row["instance_id"] == trace.task.key
        assert [each["role"] for each in row["messages"]] == [each.role for each in branch.messages]
        ends = np.flatnonzero(np.diff(np.append(mask, False).astype(int)) == -1) + 1
        assert row["turn_ends"].tolist() == ends.tolist()
        sampled = row["token_versions"][mask]
        assert (row["token_versions"][~mask] == -1).all()
        assert (sampled >= 0).all()
        versions |= set(sampled.tolist())
    assert not branches
    for row in rows[:: max(1, len(rows) // 40)]:  # the version is the one whose weights sampled the token
        for version in set(row["token_versions"].tolist()) - {-1}:
            expected = models.logprobs(version, row["tokens"].tolist())
            at = row["token_versions"][1:] == version
            np.testing.assert_allclose(row["inference_logprobs"][1:][at], expected[at], atol=3e-4)
    return versions


@pytest.mark.parametrize("groups", [8, pytest.param(200, marks=pytest.mark.long)])
async def test_a_taskset_of_ones_own(followed: Followed, groups: int) -> None:
    traces, rows = await played(followed, larger(tasks=9), groups, group_size=4, sampling={"max_tokens": 6})
    assert len(check(traces, rows, followed.models)) > 1
    assert len(rows) == groups * 4
    assert {row["about"]["metrics"]["letters"] for row in rows}


@pytest.mark.parametrize("groups", [8, pytest.param(200, marks=pytest.mark.long)])
async def test_a_textarena_game(followed: Followed, groups: int) -> None:
    """Its engine and verifiers' environment around it, with a game that needs no list of words."""
    player = {**HERE_ALONE, "harness": {"id": "larger_digit"}, "max_turns": 2}
    config = {"taskset": {"id": "games", "game": "GuessTheNumber-v0"}, "player": player}
    traces, rows = await played(followed, config, groups, **SHORT)
    check(traces, rows, followed.models)
    assert len(rows) >= groups * 2


@pytest.mark.parametrize("groups", [8, pytest.param(200, marks=pytest.mark.long)])
async def test_an_openenv_server(followed: Followed, program: Start, groups: int) -> None:
    server = program("openenv_digits")
    address = await asyncio.to_thread(server.stdout.readline)
    resets = [{"seed": number} for number in range(10)]
    player = {**HERE_ALONE, "harness": {"id": "larger_digit"}}
    config = {"taskset": {"id": "openenv", "base_url": address.strip(), "resets": resets}, "player": player}
    traces, rows = await played(followed, config, groups, **SHORT)
    check(traces, rows, followed.models)
    assert all(json.loads(row["messages"][0]["content"])["observation"]["digit"] in range(10) for row in rows)
