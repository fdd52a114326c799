"""Stands between verifiers and the inference server, and notes which policy sampled what: `Door`.

verifiers keeps no policy version, and its client gives up where the server is away for a moment. The door
passes requests and responses through as they are, asks again for a server that is away or that aborted an
answer before its first token, and reads the versions in what passes. Used by `rollout.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shmbridge import ShmBridgeError
from shmbridge.producers.rollout import HttpServer, ServerFailed, abort_waits_s
from shmbridge.producers.rollout.responses import completions_in

Tokens = npt.NDArray[np.int32]

GENERATE = "/inference/v1/generate"
_MOST_BYTES = 64 << 20  # of a request
_SESSION = "X-Session-ID"  # verifiers' header: the trace's id


def key_of(tokens: Tokens, prompt: int) -> tuple[int, bytes]:
    """Returns what names a completion among those of its trace: its prompt's length, and all its tokens."""
    return prompt, hashlib.blake2b(tokens.astype(np.int32).tobytes(), digest_size=16).digest()


@dataclass(eq=False)
class Heard:
    """What the server sampled for one trace.

    Attributes:
        versions: of each completion, by `key_of`, the policy version of each token, -1: not known.
        reasons: why each ended, by the same.
        asked_again: answers that were aborted before their first token.
    """

    versions: dict[tuple[int, bytes], Tokens] = field(default_factory=dict)
    reasons: dict[tuple[int, bytes], str] = field(default_factory=dict)
    asked_again: int = 0


class Door:
    """An HTTP server on a port of this host that passes requests on to `server`. For one event loop; an async
    context manager.

    Args:
        server: the inference server; it must have vLLM's route `/inference/v1/generate`.

    Attributes:
        heard: by the id of its trace; only what is listened for is noted.
        url: what verifiers' client asks, once entered.
    """

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.heard: dict[str, Heard] = {}
        self.url = ""
        self._runner: Any = None

    async def __aenter__(self) -> Self:
        from aiohttp import web

        application = web.Application(client_max_size=_MOST_BYTES)
        application.router.add_post(GENERATE, self._generate)
        application.router.add_get("/{path:.*}", self._pass)
        # A client that is gone, as of an episode that was late, ends its request to the server.
        self._runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=1, handler_cancellation=True
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _pass(self, request: Any) -> Any:
        return await self._response("GET", request.path, None)

    async def _generate(self, request: Any) -> Any:
        raw = await request.read()
        heard = self.heard.get(request.headers.get(_SESSION, ""))
        waits_s = abort_waits_s()
        while True:
            response = await self._response("POST", GENERATE, raw)
            if response.status != 200 or heard is None:
                return response
            body = await asyncio.to_thread(json.loads, response.body)  # with routes it has megabytes
            if not _is_aborted(body):
                _note(heard, raw, body)
                return response
            heard.asked_again += 1
            await asyncio.sleep(next(waits_s))

    async def _response(self, method: str, path: str, raw: bytes | None) -> Any:
        from aiohttp import web

        try:
            status, said = await self._server.answered(method, path, raw)
        except ServerFailed as error:
            status, said = 502, json.dumps({"error": {"message": str(error)}}).encode()
        return web.Response(status=status, body=said, content_type="application/json")


class NoTokenRoute(ShmBridgeError):
    """The inference server lacks the route from token ids to token ids, which verifiers' client asks."""

    code = "SB521"


def _is_aborted(body: Any) -> bool:
    """Whether an update of the weights ended the answer before its first token."""
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else {}
    return isinstance(first, dict) and first.get("finish_reason") == "abort" and not first.get("token_ids")


def _note(heard: Heard, raw: bytes, body: Any) -> None:
    """Notes the completions of a response; of one in another form, nothing is known."""
    for number, completion in enumerate(completions_in(body)):
        if completion.output is None:
            continue
        prompt = completion.prompt
        if prompt is None:
            prompt = np.asarray(json.loads(raw)["token_ids"], np.int32)
        versions = np.full(len(completion.output), -1, np.int32)
        for version, start, end in completion.spans:
            versions[start:end] = version
        key = key_of(np.concatenate([prompt, completion.output]), len(prompt))
        heard.versions[key] = versions
        heard.reasons[key] = str(body["choices"][number].get("finish_reason"))
