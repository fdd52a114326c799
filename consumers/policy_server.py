"""An inference server for environments that follows the learner's weights over a bridge, without files or
restarts.

    python -m shmbridge.consumers.policy_server --bridge run1 --model ./tiny --port 9004

It serves the endpoints that Atropos' server classes use: `/v1/chat/completions`, `/v1/completions`,
`/v1/models`, `/health` and token-in token-out `/generate` (server_type "vllm", the ManagedServer). Every
response carries the policy version that it was sampled under, as `weight_version` and in the header
`X-Policy-Version`. `/generate` also gives it per token (`weight_versions`, as vLLM does); all tokens have the
same version, since batches are static. New weights are loaded from the bridge's weights segment between two
batches. Without a segment, or after the learner's death, the server continues with the weights it has.

Meant for tests, demos and small models: one thread, static batches, no streaming. For large models use vLLM
with the same weights (`vllm_weights.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from shmbridge.extras import explain_missing

if __name__ == "__main__":
    explain_missing("policy_server", "learner")

import msgspec
import torch
from aiohttp import web
from shmbridge.listening import cannot_listen
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import shmbridge
from shmbridge.consumers import pretrained
from shmbridge.consumers.policy_server_parts.api import BadRequest, Json, PolicyApi
from shmbridge.consumers.policy_server_parts.engine import EngineClosed, PolicyEngine, Question, Reply
from shmbridge.consumers.policy_server_parts.follow_weights import WeightsFollower
from shmbridge.consumers.policy_server_parts.generation import PolicyModel
from shmbridge.consumers.policy_server_parts.options import parse
from shmbridge.program import refuse, run_program, tell
from shmbridge.weights import WeightsReader

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_LIMIT = 64 << 20  # bytes; a prompt of a million token ids is below 8 MiB
_VERSION_HEADER = "X-Policy-Version"
_ROUTES = "POST /v1/chat/completions, /v1/completions or /generate; GET /v1/models or /health"


class PolicyServer:
    """The HTTP side: one handler per endpoint over one engine.

    Args:
        engine: started; the server does not close it.
        api: the JSON of the engine's model.
    """

    def __init__(self, engine: PolicyEngine, api: PolicyApi) -> None:
        self._engine = engine
        self._api = api

    def application(self) -> web.Application:
        """Returns the aiohttp application; run it with `handler_cancellation=True`."""
        app = web.Application(client_max_size=_BODY_LIMIT, middlewares=[self._with_version_and_errors])
        api = self._api
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._answering(api.completions, api.completions_response)),
                web.post("/v1/chat/completions", self._answering(api.chat, api.chat_response)),
                web.post("/generate", self._answering(api.generate, api.generate_response)),
            ]
        )
        return app

    def _answering(
        self, parse: Callable[[bytes], Question], render: Callable[[Question, Reply], Json]
    ) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            question = parse(await request.read())
            if question.row_count > self._engine.max_rows:
                raise BadRequest(
                    f"{question.row_count} answers at once, at most {self._engine.max_rows} -> lower n"
                )
            reply = await self._engine.ask(question)
            return _json(render(question, reply), version=reply.version)

        return handle

    async def _health(self, request: web.Request) -> web.Response:
        stats = dataclasses.asdict(self._engine.stats())
        alive = self._engine.alive
        body = {"status": "ok" if alive else "stopped", "weight_version": self._engine.version, **stats}
        return _json(body, status=200 if alive else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return _json(self._api.models(self._engine.version))

    @web.middleware
    async def _with_version_and_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except BadRequest as error:
            response = _error(400, "invalid_request_error", str(error))
        except EngineClosed as error:
            response = _error(503, "unavailable", str(error))
        except web.HTTPException as error:  # unknown path or method, or a body over the limit
            what = f"{error.reason}: {request.method} {request.path}"
            response = _error(error.status, "invalid_request_error", f"{what} -> {_ROUTES}")
        except Exception as error:  # keep serving: log the traceback, send the client the reason
            logging.getLogger(__name__).exception("%s %s failed", request.method, request.path)
            response = _error(500, "internal_error", f"{type(error).__name__}: {error}")
        response.headers.setdefault(_VERSION_HEADER, str(self._engine.version))
        return response


def _json(body: Json, *, status: int = 200, version: int | None = None) -> web.Response:
    headers = {} if version is None else {_VERSION_HEADER: str(version)}
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers
    )


def _error(status: int, kind: str, message: str) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "code": status}}, status=status)


# --- the process ------------------------------------------------------------------------------------------


async def serve(engine: PolicyEngine, api: PolicyApi, host: str, port: int) -> int:
    """Serves until SIGINT or SIGTERM and returns the exit status; closes the engine."""
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _stop_on_signals(stopped)
    runner = web.AppRunner(
        PolicyServer(engine, api).application(),
        handler_cancellation=True,  # a client that hangs up frees its rows
        access_log=None,
        shutdown_timeout=2.0,
    )
    await runner.setup()
    engine.start()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, UnicodeError) as wrong:
            raise cannot_listen(host, port, wrong) from wrong
        bound = runner.addresses[0]
        tell("policy server", f"http://{bound[0]}:{bound[1]} serves {api.model_name}")
        return await _until_stopped(stopped, engine)
    finally:
        await asyncio.to_thread(engine.close)
        await runner.cleanup()


async def _until_stopped(stopped: asyncio.Future[int], engine: PolicyEngine) -> int:
    """Waits for a signal; notices a dead engine thread within a second."""
    while engine.alive:
        done, _ = await asyncio.wait([stopped], timeout=1.0)
        if done:
            return 128 + stopped.result()
    return 1


def _stop_on_signals(stopped: asyncio.Future[int]) -> None:
    def stop(signum: int) -> None:
        if not stopped.done():
            stopped.set_result(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop, signum)


def main(argv: list[str] | None = None) -> int:
    """Runs the server and returns its exit status."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    try:
        policy, api = _load(options)
        follower = WeightsFollower(WeightsReader(options.bridge), policy.model) if options.bridge else None
        engine = PolicyEngine(policy, follower, window_s=options.window_ms / 1e3, max_rows=options.max_rows)
        return asyncio.run(serve(engine, api, options.host, options.port))
    except (OSError, ValueError, shmbridge.ShmBridgeError) as error:  # unknown model, port in use, no memory
        refuse("policy_server", error)
        return 1


def _load(options: argparse.Namespace) -> tuple[PolicyModel, PolicyApi]:
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise shmbridge.BadArgument("--device cuda: torch sees no GPU here", hint="--device cpu")
    if not sys.stderr.isatty():
        disable_progress_bar()  # of loading: it clutters logs
    tokenizer: Any = pretrained.load(AutoTokenizer, options.model)
    model: Any = pretrained.load(AutoModelForCausalLM, options.model).to(getattr(torch, options.dtype))
    policy = PolicyModel(model.to(device), tokenizer, version=options.model_version, seed=options.seed)
    return policy, PolicyApi(tokenizer, options.model, policy.context, policy.vocab_size)


if __name__ == "__main__":
    sys.exit(run_program("policy_server", main))
