"""verifiers' environments against the real policy server, whose weights change meanwhile: the rows at the
consumer are verifiers' own traces, and every token has the version that sampled it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.weights import WeightsWriter
from tests.environments.verifiers.conftest import HERE_ALONE, Noting, larger

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


async def published(consumer: shmbridge.Consumer, writer: WeightsWriter, models: Models, over: Any) -> int:
    """Publishes new weights every half a second, until `over`; returns the last version."""
    version = 0
    while not over.is_set():
        model = models.of(version)
        await asyncio.to_thread(writer.publish, version, list(model.named_parameters()))
        consumer.publish_policy_version(version)
        version += 1
        try:
            await asyncio.wait_for(over.wait(), 0.5)
        except TimeoutError:
            continue
    return version - 1


async def played(
    bridge: str, consumer: shmbridge.Consumer, url: str, tiny: Path, config: Any, groups: int, **how: Any
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The traces of so many groups, and the rows that arrived, while weights are published."""
    rows: list[dict[str, Any]] = []
    over = asyncio.Event()
    with WeightsWriter(bridge) as writer:
        publishing = asyncio.create_task(published(consumer, writer, Models(tiny), over))
        rollout = Noting(bridge, url, str(tiny), config, lane_bytes="16M", **how)
        async with rollout:
            assert await rollout.run(rollout.tasks(), rollout.play, groups) == groups, rollout.summary()
        over.set()
        await publishing
    assert rollout.losses.episodes == {}
    for _ in range(groups):
        with consumer.get(10) as record:
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


def check(traces: list[Any], rows: list[dict[str, Any]], tiny: Path) -> set[int]:
    """Each row is a branch of one of the traces, each branch a row; returns the versions that sampled."""
    branches = {(trace.id, each.index): (trace, each) for trace in traces for each in trace.branches}
    assert len(rows) == len(branches)
    models, versions = Models(tiny), set()
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


@pytest.mark.parametrize("groups", [24, pytest.param(200, marks=pytest.mark.long)])
async def test_a_taskset_of_ones_own(
    bridge: str, consumer: shmbridge.Consumer, tiny: Path, serve: Callable[..., Any], groups: int
) -> None:
    url, _ = await asyncio.to_thread(serve)
    traces, rows = await played(
        bridge, consumer, url, tiny, larger(tasks=9), groups, group_size=4, sampling={"max_tokens": 6}
    )
    assert len(check(traces, rows, tiny)) > 1
    assert len(rows) == groups * 4
    assert {row["about"]["metrics"]["letters"] for row in rows}


@pytest.mark.parametrize("groups", [24, pytest.param(200, marks=pytest.mark.long)])
async def test_a_textarena_game(
    bridge: str, consumer: shmbridge.Consumer, tiny: Path, serve: Callable[..., Any], groups: int
) -> None:
    """Its engine and verifiers' environment around it, with a game that needs no list of words."""
    url, _ = await asyncio.to_thread(serve)
    player = {**HERE_ALONE, "harness": {"id": "larger_digit"}, "max_turns": 2}
    config = {"taskset": {"id": "games", "game": "GuessTheNumber-v0"}, "player": player}
    traces, rows = await played(bridge, consumer, url, tiny, config, groups, **SHORT)
    check(traces, rows, tiny)
    assert len(rows) >= groups * 2


@pytest.mark.parametrize("groups", [24, pytest.param(200, marks=pytest.mark.long)])
async def test_an_openenv_server(
    bridge: str,
    consumer: shmbridge.Consumer,
    tiny: Path,
    serve: Callable[..., Any],
    program: Callable[..., Any],
    groups: int,
) -> None:
    url, _ = await asyncio.to_thread(serve)
    server = program("openenv_digits")
    address = await asyncio.to_thread(server.stdout.readline)
    resets = [{"seed": number} for number in range(10)]
    player = {**HERE_ALONE, "harness": {"id": "larger_digit"}}
    config = {"taskset": {"id": "openenv", "base_url": address.strip(), "resets": resets}, "player": player}
    traces, rows = await played(bridge, consumer, url, tiny, config, groups, **SHORT)
    check(traces, rows, tiny)
    assert all(json.loads(row["messages"][0]["content"])["observation"]["digit"] in range(10) for row in rows)
