"""The ASGI application of the policy server, and serving it until a signal."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shmbridge.cli.base import tell
from shmbridge.consumers.policy_server.api import Json, PolicyApi
from shmbridge.consumers.policy_server.engine import EngineClosed, PolicyEngine, Question, Reply
from shmbridge.consumers.policy_server.sampler import NotFinite
from shmbridge.httpd.door import Bounds, Refused, Site
from shmbridge.httpd.gate import Gate, HeldBytes, Takes, json_answer, openai_error, unless_gone
from shmbridge.httpd.server import Server

Result = TypeVar("Result")

_VERSION_HEADER = "X-Policy-Version"
_ROUTES = (
    "POST /v1/chat/completions, /v1/completions, /generate or /inference/v1/generate; "
    "GET /v1/models or /health"
)
_HELD_BYTES = 256 << 20  # memory of all bodies that are not tokenised yet
_IN_MEMORY = 10  # bytes of Python lists and numbers for a byte of JSON, about
_NO_BODY = Takes(0, HeldBytes(0, in_line=False))
_LOOK_S = 1.0

Parse = Callable[[bytes], Question]
Render = Callable[[Question, Reply], Json]


class PolicyServer:
    """The ASGI application over one engine, and the gate before it. For one event loop.

    Bodies are read and answers written in a thread of their own: meanwhile the loop answers `/health`.

    Args:
        engine: started; the server does not close it.
        api: the JSON of the engine's model.
        host_names: names with a dot under which clients reach it, besides the machine's own.
        bounds: of its connections and bodies.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        api: PolicyApi,
        host_names: Collection[str] = (),
        bounds: Bounds | None = None,
    ) -> None:
        self._engine, self._api = engine, api
        self.bounds = bounds or Bounds(connections=4096)
        self._thread = ThreadPoolExecutor(1, "policy-server-json")
        self._answers: dict[str, tuple[Parse, Render]] = {
            "/v1/completions": (api.completions, api.completions_response),
            "/v1/chat/completions": (api.chat, api.chat_response),
            "/generate": (api.generate, api.generate_response),
            "/inference/v1/generate": (api.tokens, api.tokens_response),
        }
        self._says: dict[str, Callable[[], Response]] = {"/health": self._health, "/v1/models": self._models}
        largest = f"send less at once: the context has {api.context} tokens"
        self._posts = Takes(
            api.most_body, HeldBytes(_HELD_BYTES, in_line=False), self.bounds.room_s, _IN_MEMORY, largest
        )
        self._gate = Gate(
            self._answer,
            check=Site(host_names, "--host-name {name}", forms=False).check,
            takes=self._takes,
            refused=self._refused,
            bounds=self.bounds,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        await self._gate(scope, receive, send)

    def close(self) -> None:
        """Ends its thread, once that has read what it reads. Never blocks."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _takes(self, path: str, method: str) -> Takes | None:
        if path in self._answers and method == "POST":
            return self._posts
        return _NO_BODY if path in self._says and method in ("GET", "HEAD") else None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._response(scope, receive)
        except ClientDisconnect:
            return
        except EngineClosed as error:
            response = self._refused(Refused(503, str(error), "closed"))
        except NotFinite as error:
            response = self._refused(Refused(500, str(error), "not finite"))
        except Refused:
            raise
        except Exception as error:  # keep serving: log the traceback, send the client the reason
            logging.getLogger(__name__).exception("%s %s failed", scope["method"], scope["path"])
            response = self._refused(Refused(500, f"{type(error).__name__}: {error}", "failed"))
        await response(scope, receive, send)

    async def _response(self, scope: Scope, receive: Receive) -> Response:
        method, path = scope["method"], scope["path"]
        if self._takes(path, method) is None:
            known = path in self._answers or path in self._says
            what = "Method Not Allowed" if known else "Not Found"
            raise Refused(405 if known else 404, f"{what}: {method} {path} -> {_ROUTES}", "path")
        if path in self._says:
            return self._says[path]()
        parse, render = self._answers[path]
        read = self._in_thread(parse, (await receive())["body"])
        question = await read
        scope["booking"].release()
        reply = await unless_gone(self._engine.ask(question), receive)
        return self._json(await self._in_thread(render, question, reply), version=reply.version)

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _health(self) -> Response:
        stats = dataclasses.asdict(self._engine.stats())
        alive = self._engine.alive
        body = {"status": "ok" if alive else "stopped", "weight_version": self._engine.version, **stats}
        return self._json(body, status=200 if alive else 503)

    def _models(self) -> Response:
        return self._json(self._api.models(self._engine.version))

    def _refused(self, refused: Refused) -> Response:
        response = openai_error(refused)
        response.headers[_VERSION_HEADER] = str(self._engine.version)
        return response

    def _json(self, body: Json, *, status: int = 200, version: int | None = None) -> Response:
        shown = self._engine.version if version is None else version
        return json_answer(body, status, {_VERSION_HEADER: str(shown)})


async def serve(engine: PolicyEngine, application: PolicyServer, listener: socket.socket, name: str) -> int:
    """Serves until SIGINT or SIGTERM, or the engine's end; returns the exit status. Closes the engine.

    Args:
        name: of the model, for the line that says where it is served.
    """
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = Server(
        application,
        application.bounds,
        ready=lambda: tell("policy server", f"{url} serves {name}"),
        ending=engine.close,
    )
    engine.start()
    watch = asyncio.create_task(_end_with(engine, server))
    try:
        await server.serve([listener])
    finally:
        watch.cancel()
        application.close()
        await asyncio.to_thread(engine.close)
    return 1 if server.signal is None else 128 + server.signal


async def _end_with(engine: PolicyEngine, server: Server) -> None:
    """Ends the server within a second after the engine's thread."""
    while engine.alive:
        await asyncio.sleep(_LOOK_S)
    server.should_exit = True
