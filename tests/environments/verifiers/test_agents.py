"""verifiers' own `bash` agent, a program that it starts with uv: its tool calls run, its turns are one row.

First a scripted server stands for the model: it answers token ids on the real route. The rest is real:
verifiers, its program and its interception, the shell, the bridge. Then a tiny model learns from those rows
to call the tool, and plays on the real policy server while its weights change.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmbridge
from shmbridge.producers.verifiers import VerifiersRollout
from tests.environments.byte_tokenizer import SPECIAL, byte_tokenizer
from tests.environments.verifiers import test_policy_server as followed
from tests.environments.verifiers.conftest import Noting

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
AGENT = {"harness": {"id": "bash", "edit": False}, "runtime": {"type": "subprocess"}, "max_turns": 4}
CONFIG = {"taskset": {"id": "write_files"}, "agent": AGENT}
RENDERER = {"name": "default", "tool_parser": "qwen3"}
WORDS = 2  # the first tasks of the taskset, with which the model is taught


def call(word: str) -> str:
    said = {"name": "bash", "arguments": {"command": f"printf {word} > answer.txt"}}
    return f"<tool_call>{json.dumps(said)}</tool_call><|end|>"


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of bytes, with a token for each end of a call; in tmp_path / "model", too."""
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<tool_call>", "</tool_call>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # uv
    return AutoTokenizer.from_pretrained(tmp_path / "model")


@asynccontextmanager
async def scripted(tokenizer: Any) -> AsyncIterator[str]:
    """The address of a server that calls the tool as its task says, and then is done."""
    from aiohttp import web

    async def models(request: Any) -> Any:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": 20000}]})

    async def generate(request: Any) -> Any:
        body = await request.json()
        if "token_ids" not in body:
            return web.json_response({}, status=400)
        text = tokenizer.decode(body["token_ids"])
        turn = text.count("<|tool|>")
        said = "done<|end|>" if turn else call(re.search(r"Write the word (\w+)", text)[1])
        ids = tokenizer.encode(said, add_special_tokens=False)
        content = [{"token": f"token_id:{each}", "logprob": -0.5} for each in ids]
        spans = [{"version": str(turn), "start": 0, "end": len(ids)}]
        choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"choices": [choice | {"weight_versions": spans}]})

    application = web.Application(client_max_size=1 << 26)
    application.router.add_get("/v1/models", models)
    application.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def demonstrated(bridge: str, consumer: shmbridge.Consumer, tokenizer: Any, folder: Path) -> list[Any]:
    """Tokens and mask of a row for each of the first tasks, played by the scripted server."""
    how: dict[str, Any] = {"renderer": RENDERER, "group_size": 1, "lane_bytes": "4M"}
    async with (
        scripted(tokenizer) as url,
        VerifiersRollout(bridge, url, str(folder), CONFIG, **how) as rollout,
    ):
        assert await rollout.run(rollout.tasks(epochs=1), rollout.play, WORDS) == WORDS, rollout.summary()
    rows = []
    for _ in range(WORDS):
        with consumer.get(5) as record:
            assert record["score"].tolist() == [1.0]
            (about,) = record.json("extra")["rows"]
            assert about["metrics"]["turns"] == 2
            (dialogue,) = record.json("messages")
            assert [each["role"] for each in dialogue] == ["system", "user", "assistant", "tool", "assistant"]
            tokens, mask = record["tokens"][0].copy(), record["loss_mask"][0].astype(bool)
            done = len(tokenizer.encode("done<|end|>", add_special_tokens=False))
            sampled = int(mask.sum())
            assert record["token_versions"][0][mask].tolist() == [0] * (sampled - done) + [1] * done
            rows.append((tokens, mask, tokenizer.decode(tokens[mask])))
    return rows


def taught(folder: Path, vocabulary: int, rows: list[Any]) -> None:
    """Writes two layers of width 64 that say what the rows sample, after 300 steps from random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model, steps = Qwen2ForCausalLM(config), 300
    longest = max(len(tokens) for tokens, *_ in rows)
    ids, labels = np.zeros((len(rows), longest), np.int64), np.full((len(rows), longest), -100)
    for row, (tokens, mask, _) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)][mask] = tokens[mask]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-2, total_steps=steps)
    for _ in range(steps):
        loss = model(input_ids=torch.from_numpy(ids), labels=torch.from_numpy(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert loss.item() < 0.01
    model.save_pretrained(folder)


class Warmer(followed.Models):
    """The taught model's weights; versions differ in how sure they are of a token."""

    def of(self, version: int) -> Any:
        import torch

        with torch.no_grad():
            self._model.lm_head.weight.copy_(self._first[-1] * (1 - 0.15 * (version % 3)))
        return self._model


class Taught(Noting):
    """Plays the tasks with which the model was taught."""

    def tasks(self, **how: Any) -> Any:
        while True:
            yield from islice(super().tasks(**how), WORDS)


async def test_the_bash_agent_writes_a_file(
    bridge: str, consumer: shmbridge.Consumer, tmp_path: Path, tokenizer: Any
) -> None:
    rows = await demonstrated(bridge, consumer, tokenizer, tmp_path / "model")
    assert {said for *_, said in rows} == {call(word) + "done<|end|>" for word in ("bridge", "lane")}


async def test_a_model_that_calls_the_tool_while_its_weights_change(
    bridge: str,
    consumer: shmbridge.Consumer,
    tmp_path: Path,
    tokenizer: Any,
    program: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are verifiers' own traces, each token of the version whose weights sampled it."""
    folder = tmp_path / "model"
    demonstrations = await demonstrated(bridge, consumer, tokenizer, folder)
    await asyncio.to_thread(taught, folder, len(tokenizer), demonstrations)
    words = ("serve", "--bridge", bridge, "--model", folder, "--port", 0)
    line = await asyncio.to_thread(program("shmbridge", *words).stdout.readline)
    url = "http://" + line.split("http://")[1].split()[0]
    monkeypatch.setattr(followed, "Models", Warmer)
    monkeypatch.setattr(followed, "Noting", Taught)
    how: dict[str, Any] = {"renderer": RENDERER, "group_size": 2, "sampling": {"max_tokens": 120}}
    traces, rows = await followed.played(bridge, consumer, url, folder, CONFIG, 3, **how)
    versions = followed.check(traces, rows, folder)
    assert len(versions) > 1
    called = [row for row in rows if len(row["turn_ends"]) == 2]
    print(f"{len(called)} of {len(rows)} rows have two turns; versions {sorted(versions)}")
    assert len(called) >= 2  # it samples: a wrong byte of a call ends an episode after one turn
    assert max(row["score"] for row in called) == 1.0
    for row in called:
        roles = [each["role"] for each in row["messages"]]
        assert roles[2:] == ["assistant", "tool", "assistant"]
    within = [row for row in called if len(set(row["token_versions"].tolist()) - {-1}) > 1]
    assert within  # an update fell into an episode
    models = Warmer(folder)  # and a wrong version would have been seen
    row = within[0]
    tokens = row["tokens"].tolist()
    assert (
        np.abs(models.logprobs(0, tokens) - models.logprobs(1, tokens))[row["loss_mask"][1:] == 1].max()
        > 6e-4  # check() allows 3e-4
    )


async def test_mini_swe_agent_wants_a_container(
    bridge: str,
    consumer: shmbridge.Consumer,
    tmp_path: Path,
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """verifiers refuses it on the host itself: each episode fails, and the log says why."""
    agent = AGENT | {"harness": {"id": "mini_swe_agent"}}
    how: dict[str, Any] = {"renderer": RENDERER, "group_size": 1, "lane_bytes": "4M"}
    config, folder = CONFIG | {"agent": agent}, str(tmp_path / "model")
    async with scripted(tokenizer) as url, VerifiersRollout(bridge, url, folder, config, **how) as rollout:
        assert await rollout.run(rollout.tasks(epochs=1), rollout.play, 1) == 0
    assert rollout.losses.episodes == {"EnvError": 1}
    assert "'mini_swe_agent' needs a container runtime" in caplog.text
