"""verifiers' own `bash` agent, a program that it starts with uv: its tool calls run, its turns are one row.

A scripted server stands for the model alone, whose weights cannot be had: it answers token ids on the real
route. The rest is real: verifiers, its program and its interception, the shell, the bridge.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import shmbridge
from shmbridge.producers.verifiers import VerifiersRollout
from tests.environments.byte_tokenizer import SPECIAL, byte_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CALL = {"name": "bash", "arguments": {"command": "printf bridge > answer.txt"}}


async def test_the_bash_agent_writes_a_file(
    bridge: str, consumer: shmbridge.Consumer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiohttp import web
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<tool_call>", "</tool_call>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    said = [f"<tool_call>{json.dumps(CALL)}</tool_call><|end|>", "done<|end|>"]
    answers = [tokenizer.encode(each, add_special_tokens=False) for each in said]

    async def models(request: Any) -> Any:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": 20000}]})

    async def generate(request: Any) -> Any:
        body = await request.json()
        if "token_ids" not in body:
            return web.json_response({}, status=400)
        turn = tokenizer.decode(body["token_ids"]).count("<|tool|>")
        ids = answers[min(turn, 1)]
        content = [{"token": f"token_id:{each}", "logprob": -0.5} for each in ids]
        spans = [{"version": str(turn), "start": 0, "end": len(ids)}]
        choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"choices": [choice | {"weight_versions": spans}]})

    application = web.Application(client_max_size=1 << 26)
    application.router.add_get("/v1/models", models)
    application.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # uv
    agent = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    try:
        rollout = VerifiersRollout(
            bridge,
            "http://{}:{}".format(*runner.addresses[0]),
            str(tmp_path),
            {"taskset": {"id": "write_files"}, "agent": agent},
            renderer={"name": "default", "tool_parser": "qwen3"},
            group_size=2,
            lane_bytes="4M",
        )
        async with rollout:
            assert await rollout.run(rollout.tasks(epochs=1), rollout.play, 1) == 1, rollout.summary()
    finally:
        await runner.cleanup()
    with consumer.get(5) as record:
        assert record["score"].tolist() == [1.0, 1.0]
        for about in record.json("extra")["rows"]:
            assert about["metrics"]["turns"] == 2
        dialogue = record.json("messages")[0]
        assert [each["role"] for each in dialogue] == ["system", "user", "assistant", "tool", "assistant"]
        tokens, mask = record["tokens"][0], record["loss_mask"][0].astype(bool)
        assert tokens[mask].tolist() == [*answers[0], *answers[1]]
        assert record["token_versions"][0][mask].tolist() == [0] * len(answers[0]) + [1] * len(answers[1])
