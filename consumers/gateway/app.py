"""The routes: Atropos' HTTP API on FastAPI. Posts are parsed in threads, not by FastAPI in the event loop."""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
import re
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from pydantic import AfterValidator, BaseModel, Field
from starlette.exceptions import HTTPException

from shmbridge import BatchTooBig, ConsumerTaken, Run, ShmBridgeError
from shmbridge.consumers.gateway.batches import NotRegistered
from shmbridge.consumers.gateway.bodies import KEYS, read_post
from shmbridge.consumers.gateway.gateway import Gateway
from shmbridge.consumers.gateway.limits import Front, Refusals
from shmbridge.control import RequestRefused
from shmbridge.httpd.door import Refused
from shmbridge.httpd.gate import HeldBytes, json_answer, outcome
from shmbridge.metrics import COUNTERS, LatencyWindow
from shmbridge.watch.exporter import CONTENT_TYPE, Exporter, Sample

log = logging.getLogger(__name__)

_BARE_EXAMPLE = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "generation_params",
    "inference_logprobs",
    "messages",
    "images",
)
_OF_BRIDGE = "bridge_"  # the consumer's counters in a gateway's, if it is the hub
# Those that observers do not see; the names of all others of the consumer are theirs.
_OWN = {
    each.stats: each.prometheus for each in COUNTERS if each.stats and not each.words and each.per == "bridge"
}
_NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}


def _utf8(text: str) -> str:
    text.encode()  # a lone surrogate raises ValueError: kept text must be encodable in later responses
    return text


_Count = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]  # the range of the hub's messages
_Text = Annotated[str, Field(max_length=4096), AfterValidator(_utf8)]  # of names and paths


class Registration(BaseModel):
    """A trainer's run."""

    wandb_group: _Text
    wandb_project: _Text
    batch_size: _Count
    max_token_len: _Count
    checkpoint_dir: _Text
    save_checkpoint_interval: _Count
    starting_step: _Count
    num_steps: _Count


class RegisterEnv(BaseModel):
    """An environment's registration request."""

    max_token_length: _Count
    desired_name: _Text
    weight: float
    group_size: _Count
    min_batch_allocation: float | None = None


class EnvIdentifier(BaseModel):
    """An environment's number."""

    env_id: _Count


def make_app(
    gateway: Gateway, refusals: Refusals | None = None, greeting: dict[str, str] | None = None
) -> FastAPI:
    """Returns the application of one gateway, which must be open while it serves."""
    options, refusals = gateway.options, refusals or Refusals()
    held, timing = HeldBytes(options.held_bytes), LatencyWindow()
    parsers = ThreadPoolExecutor(2, "shmbridge-gateway-parser")
    exporter, looks = Exporter(lambda: [options.bridge]), ThreadPoolExecutor(1, "shmbridge-gateway-metrics")
    app = FastAPI(title="shmbridge gateway", strict_content_type=False)
    routes: dict[str, set[str]] = {}
    app.add_middleware(Front, options=options, refusals=refusals, held=held, routes=routes)

    @app.exception_handler(Refused)
    async def refused(request: Request, refused: Refused) -> Response:
        return refusals.answer(refused)

    @app.exception_handler(HTTPException)
    async def not_taken(request: Request, wrong: HTTPException) -> Response:
        if wrong.status_code not in (404, 405):
            return await http_exception_handler(request, wrong)
        said = _no_route(request.method, request.url.path, routes)
        return json_answer({"detail": said}, wrong.status_code, dict(wrong.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, wrong: RequestValidationError) -> Response:
        kind = request.headers.get("content-type", "application/json")
        if "json" not in kind:
            said = f"the body came as {kind} -> send it with Content-Type: application/json"
            return refusals.answer(Refused(422, said, "malformed"))
        refusals.counts["malformed"] += 1
        return json_answer(
            {"detail": [{key: each[key] for key in ("type", "loc", "msg")} for each in wrong.errors()]}, 422
        )

    @app.exception_handler(ShmBridgeError)
    async def failed(request: Request, error: ShmBridgeError) -> Response:
        kinds = {BatchTooBig: 507, ConsumerTaken: 409, RequestRefused: 422}
        status = next((status for kind, status in kinds.items() if isinstance(error, kind)), 503)
        return refusals.answer(Refused(status, str(error), type(error).__name__))

    @app.get("/")
    async def root() -> Any:
        return greeting or {"message": "shmbridge gateway", "bridge": options.bridge}

    @app.post("/register")
    async def register(registration: Registration) -> Any:
        await gateway.register(Run(**registration.model_dump()))
        return {"uuid": uuid.uuid4().int}

    @app.post("/register-env")
    async def register_env(wish: RegisterEnv) -> Any:
        return await gateway.register_env(wish.model_dump())

    @app.post("/disconnect-env")
    async def disconnect_env(which: EnvIdentifier) -> Any:
        return await gateway.disconnect_env(which.env_id)

    @app.get("/wandb_info")
    async def wandb_info() -> Any:
        run = await gateway.run()
        return {"group": run.wandb_group if run else None, "project": run.wandb_project if run else None}

    @app.get("/info")
    async def info() -> Any:
        run = await gateway.run()
        return {
            "batch_size": run.batch_size if run else -1,
            "max_token_len": run.max_token_len if run else -1,
        }

    @app.get("/status")
    async def status() -> Any:
        return await gateway.status()

    @app.get("/status-env")
    async def status_env(which: EnvIdentifier) -> Any:
        return await gateway.env_status(which.env_id)

    @app.get("/batch")
    async def batch(request: Request) -> Response:
        gzip = "gzip" in request.headers.get("accept-encoding", "").lower()
        try:
            found = await gateway.batch(request.state.connection, gzip)
        except NotRegistered:
            return json_answer(_NOT_REGISTERED)
        if found is None:
            return json_answer({"batch": None})
        return Response(
            found.body, media_type="application/json", headers={"content-encoding": "gzip"} if gzip else {}
        )

    @app.get("/latest_example")
    async def latest_example(request: Request) -> Response:
        group = await gateway.latest()
        if group is None:
            return json_answer({name: [] for name in _BARE_EXAMPLE})
        full = (
            group
            if set(KEYS) <= set(group)
            else {name: group.get(name) for name in KEYS} | group.get("extra", {})
        )
        return json_answer(full)

    async def take(request: Request, many: bool) -> list[int | None]:
        body = await request.body()
        loop = asyncio.get_running_loop()
        read = partial(read_post, many=many, extras=gateway.taker.extras)
        posted = await loop.run_in_executor(parsers, outcome, read, body)
        if isinstance(posted, Refused):
            del body
            raise posted
        items, failed = sum(len(group["tokens"]) for group in posted.groups), True
        try:
            waited_s = time.monotonic() - request.scope["arrived_s"]
            outcomes = await gateway.post(posted, request.state.connection, waited_s)
            failed = False
        finally:
            timing.add(time.monotonic() - request.scope["arrived_s"], items=items, failed=failed)
        return outcomes

    @app.post("/scored_data")
    async def scored_data(request: Request) -> Any:
        (outcome,) = await take(request, False)
        return {"status": "received"} if outcome is None else {"status": "buffered", "buffer_size": outcome}

    @app.post("/scored_data_list")
    async def scored_data_list(request: Request) -> Any:
        outcomes = await take(request, True)
        answer: dict[str, Any] = {"status": "received", "groups_processed": len(outcomes)}
        if buffered := [each for each in outcomes if each is not None]:
            answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
        return answer

    @app.get("/reset_data")
    async def reset_data() -> Response:
        await gateway.reset()
        return PlainTextResponse("Reset successful")

    def counters() -> dict[str, float]:
        reasons = {f"refused_total{{{kind}}}": count for kind, count in sorted(refusals.counts.items())}
        counts = {**reasons, "refused_total": refusals.counts.total(), "held_bytes": held.held}
        return {**gateway.stats(), **counts, **timing.metrics()}

    @app.get("/stats")
    async def stats() -> Response:
        return json_answer(counters())

    @app.get("/metrics")
    async def metrics() -> Response:
        own = samples(options.bridge, counters())
        # in one thread: an exporter is for one at a time, and a look may take milliseconds
        text = await asyncio.get_running_loop().run_in_executor(looks, exporter.text, own)
        return Response(text, media_type=CONTENT_TYPE)

    for route in app.routes:
        routes.setdefault(getattr(route, "path", ""), set()).update(getattr(route, "methods", None) or ())
    return app


def _no_route(method: str, path: str, routes: Mapping[str, Collection[str]]) -> str:
    """Returns what is said about a request that no route takes."""
    if path in routes:
        taken = " or ".join(sorted(set(routes[path]) - {"HEAD"}))
        return f"{path} does not take {method} -> {taken} {path}"
    near = difflib.get_close_matches(path, routes, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/reference/gateway.md lists the routes"
    return f"there is no route {path} -> {hint}"


def samples(bridge: str, counters: Mapping[str, float]) -> Iterator[Sample]:
    """Yields the gateway's counters, and those of its consumer that no observer sees. Never blocks.

    Args:
        bridge: its name.
        counters: as in `/stats`; the part of a name in braces becomes the label `reason`. The sum over such
            reasons is left out: Prometheus adds.
    """
    with_reasons = {key.partition("{")[0] for key in counters if "{" in key}
    for key, value in counters.items():
        name, _, reason = key.partition("{")
        if not math.isfinite(value) or key in with_reasons:
            continue
        labels = [("bridge", bridge), *([("reason", reason.rstrip("}"))] if reason else [])]
        if not key.startswith(_OF_BRIDGE):
            yield Sample("shmbridge_gateway_" + re.sub(r"\W", "_", name), tuple(labels), value)
        elif (known := _OWN.get(key.removeprefix(_OF_BRIDGE))) is not None:
            yield Sample(known, tuple(labels), value)
