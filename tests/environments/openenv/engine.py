"""An inference server that calls tools as a test writes it: chat completions with token ids, as vLLM's.

It stands for an engine with a trained model, whose tool parser finds the calls in what was sampled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.environments.byte_tokenizer import byte_tokenizer

Json = dict[str, Any]
Said = tuple[str, Json | None]  # text, and the arguments of a call of the tool `bash`

TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + (tools | map(attribute='function.name') | join(' ')) + '<|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<call>' + call['function']['name'] + ' ' + call['function']['arguments'] + '</call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def sampled_text(said: Said) -> str:
    """What the model samples for it, without the end token."""
    text, arguments = said
    return text if arguments is None else f"{text}<call>bash {json.dumps(arguments)}</call>"


@dataclass
class Engine:
    """Answers call n of a conversation with `say(messages)`; log-probability i is -(i + 1) / 128.

    `versions(tokens)` are those of the answer's tokens, and are said as vLLM 0.32 says them, in spans.
    """

    say: Callable[[list[Json]], Said]
    versions: Callable[[int], Sequence[int]] = lambda tokens: [0] * tokens
    without: Sequence[str] = ()  # keys that its answers lack
    bodies: list[Json] = field(default_factory=list)
    answers: list[tuple[list[int], list[int], list[int]]] = field(
        default_factory=list
    )  # prompt, answer, versions
    url: str = ""

    def __post_init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.tokenizer.chat_template = TEMPLATE

    def rendered(self, messages: list[Json], tools: list[Json] | None, *, ask: bool = True) -> list[int]:
        """The tokens of a conversation."""
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=ask
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def _handle(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "scripted", "max_model_len": 65536}]})
        body = await request.json()
        probe = not body.get("tools")
        prompt = self.rendered(body["messages"], body.get("tools"))
        said: Said = ("ok", None) if probe else self.say(body["messages"])
        tokens = self.tokenizer.encode(sampled_text(said), add_special_tokens=False)
        tokens.append(self.tokenizer.eos_token_id)
        versions = [0] * len(tokens) if probe else list(self.versions(len(tokens)))
        if not probe:
            self.bodies.append(body)
            self.answers.append((prompt, tokens, versions))
        spans, at = [], 0
        for index in range(1, len(tokens) + 1):
            if index == len(tokens) or versions[index] != versions[at]:
                spans.append({"version": str(versions[at]), "start": at, "end": index})
                at = index
        text, arguments = said
        message: Json = {"role": "assistant", "content": text}
        if arguments is not None:
            call = {"name": "bash", "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": f"call_{len(prompt)}", "type": "function", "function": call}]
        content = [{"token": f"token_id:{t}", "logprob": -(i + 1) / 128} for i, t in enumerate(tokens)]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop" if arguments is None else "tool_calls",
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        choice = {key: value for key, value in choice.items() if key not in self.without}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "cost": 0.0}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [choice],
        }
        return web.json_response({**answer, "prompt_token_ids": prompt, "usage": usage})


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Engine]:
    """The engine on a free port of 127.0.0.1, in the running event loop."""
    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.route("*", "/{anything:.*}", engine._handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        engine.url = f"http://{host}:{port}"
        yield engine
    finally:
        await runner.cleanup()
