"""Stands between verifiers and the inference server, and notes which policy sampled what: `Door`.

verifiers keeps no policy version, and its client gives up where the server is away for a moment. The door
passes requests and responses through as they are, asks again for a server that is away or that aborted an
answer before its first token, and reads the versions in what passes. Its bodies pass the front door of all
HTTP servers here (`shmbridge.httpd`). Used by `rollout.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from shmbridge import ShmBridgeError
from shmbridge.httpd.door import Bounds, Headers, Refused, Site
from shmbridge.producers.rollout import HttpServer, ServerFailed, abort_waits_s
from shmbridge.producers.rollout.sampling import completions_in
from shmbridge.put import token_array

Tokens = npt.NDArray[np.int32]

GENERATE = "/inference/v1/generate"
# verifiers' client opens 1,000 connections at most. A request's body is held until it is answered, so that it
# can be asked again: the next waits for room as long as an answer may take.
BOUNDS = Bounds(body_bytes=64 << 20, bodies_bytes=256 << 20, room_s=600.0)
_SESSION = "x-session-id"  # verifiers' header: the trace's id
_SECRET = "x-shmbridge-secret"


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

    It takes bodies within `bounds`, and requests with the headers in `headers` alone: a program of an agent
    on this host, or a browser's page, could sample unseen otherwise.

    Args:
        server: the inference server; it must have vLLM's route `/inference/v1/generate`.
        bounds: of its connections and bodies.

    Attributes:
        heard: by the id of its trace; only what is listened for is noted.
        headers: those with the secret, new each time.
        url: what verifiers' client asks, once entered.
    """

    def __init__(self, server: HttpServer, bounds: Bounds = BOUNDS) -> None:
        self._server, self._bounds = server, bounds
        self._site, self._secret = Site(hint="ask it by its address, not from a page"), secrets.token_hex(16)
        self.heard: dict[str, Heard] = {}
        self.headers = {_SECRET: self._secret}
        self.url = ""
        self._listening: Any = None

    async def __aenter__(self) -> Self:
        from shmbridge.httpd.server import LoopServer

        self._listening = LoopServer(
            self._answer,
            check=self._check,
            reads=lambda path, method: (path, method) == (GENERATE, "POST"),
            bounds=self._bounds,
        )
        await self._listening.start()
        self.url = f"{self._listening.url}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._listening.close()

    def _check(self, header: Headers) -> None:
        self._site.check(header)
        if not hmac.compare_digest(header(_SECRET).encode(), self._secret.encode()):
            raise Refused(403, f"{_SECRET} is not this door's -> ask the inference server itself", "token")

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """One request. If its client is gone, as of an episode that was late, it ends at the server, too."""
        from shmbridge.httpd.gate import json_answer, unless_gone

        method, path = scope["method"], scope["path"]
        if (path, method) == (GENERATE, "POST"):
            session = dict(scope["headers"]).get(_SESSION.encode(), b"").decode("latin-1")
            work = self._generated(bytes((await receive())["body"]), self.heard.get(session))
        elif method == "GET" and path != GENERATE:
            work = self._answered("GET", _target(scope), None)
        else:
            detail = f"{method} {path} is not passed on -> POST {GENERATE}, or GET another path"
            raise Refused(405, detail, "path")
        status, said = await unless_gone(work, receive)
        await json_answer(msgspec.Raw(said), status)(scope, receive, send)

    async def _generated(self, raw: bytes, heard: Heard | None) -> tuple[int, bytes]:
        waits_s = abort_waits_s()
        while True:
            status, said = await self._answered("POST", GENERATE, raw)
            if status != 200 or heard is None:
                return status, said
            if await asyncio.to_thread(_note, heard, raw, said):  # with routes it has megabytes
                return status, said
            heard.asked_again += 1
            await asyncio.sleep(next(waits_s))

    async def _answered(self, method: str, path: str, raw: bytes | None) -> tuple[int, bytes]:
        try:
            return await self._server.answered(method, path, raw)
        except ServerFailed as error:
            return 502, json.dumps({"error": {"message": str(error)}}).encode()


class NoTokenRoute(ShmBridgeError):
    """The inference server lacks the route from token ids to token ids, which verifiers' client asks."""

    code = "SB521"


def _target(scope: Any) -> str:
    """Returns path and query as they came. Raises Refused: the target would name another server."""
    path = str(scope["raw_path"], "ascii")
    if not path.startswith("/") or path.startswith("//"):
        raise Refused(400, f"{path} does not begin with exactly one / -> ask for a path", "path")
    return f"{path}?{query}" if (query := str(scope["query_string"], "ascii")) else path


def _is_aborted(body: Any) -> bool:
    """Whether an update of the weights ended the answer before its first token."""
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else {}
    return isinstance(first, dict) and first.get("finish_reason") == "abort" and not first.get("token_ids")


def _note(heard: Heard, raw: bytes, said: bytes) -> bool:
    """Notes the completions of an answer, of which nothing is known if it, or the request, has another form;
    False, and nothing noted, if it was aborted. In any thread.
    """
    try:
        body = json.loads(said)
        if _is_aborted(body):
            return False
        for choice in body["choices"]:
            for completion in completions_in({**body, "choices": [choice]}):  # none, if it has no tokens
                prompt, output = completion.prompt, completion.output
                if prompt is None:
                    prompt = token_array(json.loads(raw)["token_ids"])
                if prompt is None or output is None:
                    continue
                versions = np.full(len(output), -1, np.int32)
                for version, start, end in completion.spans:
                    versions[start:end] = version
                key = key_of(np.concatenate([prompt, output]), len(prompt))
                heard.versions[key] = versions
                heard.reasons[key] = str(choice.get("finish_reason"))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return True
