"""An inference server whose answers a test writes, in each of the forms that servers speak.

It stands for engines that do not run here (SGLang) and for texts that a model would have to be trained for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]


@dataclass
class ScriptedServer:
    """Answers a prompt with `answer(prompt token ids) -> text`; log-probability i is -(i + 1) / 128."""

    tokenizer: Any
    answer: Callable[[list[int]], str]
    owner: str = "vllm"
    version: int = 0
    ends: bool = True  # whether an answer has its end token
    without: Sequence[str] = ()  # keys that its responses lack
    statuses: list[int] = field(default_factory=list)  # of the next requests, before it answers again
    prompts: list[list[int]] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)
    url: str = ""

    def sampled(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        tokens = self.tokenizer.encode(self.answer(prompt), add_special_tokens=False)
        tokens += [self.tokenizer.eos_token_id] if self.ends else []
        return tokens, [-(at + 1) / 128 for at in range(len(tokens))]

    async def _handle(self, request: web.Request) -> web.Response:
        await asyncio.sleep(0)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="not now")
        if request.method == "GET":
            return (
                web.json_response(self._about(request.path))
                if self._about(request.path)
                else web.Response(status=404)
            )
        body = await request.json()
        self.bodies.append(body)
        said = {
            "/generate": self._sglang if "input_ids" in body else self._generate,
            "/v1/completions": self._completions,
            "/inference/v1/generate": self._vllm,
            "/v1/chat/completions": self._chat,
        }[request.path](body)
        return web.json_response(said)

    def _about(self, path: str) -> Json:
        if path == "/v1/models":
            return {"data": [{"id": "scripted", "owned_by": self.owner, "max_model_len": 4096}]}
        if path == "/openapi.json":
            routes = [] if "/inference/v1/generate" in self.without else ["/inference/v1/generate"]
            return {"paths": {key: {} for key in routes}}
        return {}

    def _kept(self, fields: Json) -> Json:
        return {key: value for key, value in fields.items() if key not in self.without}

    def _generate(self, body: Json) -> Json:
        prompt = self._noted(body["prompt"]["prompt_token_ids"])
        tokens, logprobs = self.sampled(prompt)
        return {
            "token_ids": [tokens],
            "prompt_token_ids": prompt,
            "logprobs": [[[{str(t): value}] for t, value in zip(tokens, logprobs, strict=True)]],
            "finish_reasons": ["stop" if self.ends else "length"],
            "weight_version": self.version,
            "weight_versions": [[{"version": str(self.version), "start": 0, "end": len(tokens)}]],
        }

    def _vllm(self, body: Json) -> Json:
        tokens, logprobs = self.sampled(self._noted(body["token_ids"]))
        half = len(tokens) // 2
        content = [{"token_id": t, "logprob": value} for t, value in zip(tokens, logprobs, strict=True)]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": "stop" if self.ends else "length",
            "weight_versions": [
                {"version": str(self.version), "start": 0, "end": half},
                {"version": str(self.version + 1), "start": half, "end": len(tokens)},
            ],
        }
        return {"choices": [self._kept(choice)]}

    def _completions(self, body: Json) -> Json:
        prompt = self._noted(body["prompt"])
        tokens, logprobs = self.sampled(prompt)
        choice = {
            "token_ids": tokens,
            "prompt_token_ids": prompt[1:] if "first prompt token" in self.without else prompt,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": "stop" if self.ends else "length",
        }
        return {
            "choices": [self._kept(choice)],
            "weight_version": self.version,
            "oldest_weight_version": self.version,
        }

    def _sglang(self, body: Json) -> Json:
        tokens, logprobs = self.sampled(self._noted(body["input_ids"]))
        return {
            "output_ids": tokens,
            "meta_info": {
                "output_token_logprobs": [
                    [value, t, None] for t, value in zip(tokens, logprobs, strict=True)
                ],
                "finish_reason": {"type": "stop" if self.ends else "length"},
                "weight_version": str(self.version),
            },
        }

    def _chat(self, body: Json) -> Json:
        text = self.answer(self.tokenizer.encode(body["messages"][-1]["content"]))
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}

    def _noted(self, prompt: list[int]) -> list[int]:
        self.prompts.append(list(prompt))
        return list(prompt)


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    """The server on a free port of 127.0.0.1, in the running event loop."""
    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.route("*", "/{anything:.*}", server._handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()
