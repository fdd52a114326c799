"""The routes: Atropos' HTTP API on FastAPI, and the gate before it: token, limits, gunzip.

Knows HTTP; what is answered is modes.py's. Bodies of posts are not FastAPI's to parse: it would do so in the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from pydantic import AfterValidator, BaseModel, Field

from shmbridge import BatchTooBig, ConsumerTaken, Run, ShmBridgeError
from shmbridge.consumers.gateway import bodies
from shmbridge.consumers.gateway.bodies import KEYS, Refused
from shmbridge.consumers.gateway.modes import Mode
from shmbridge.consumers.gateway.options import GatewayOptions
from shmbridge.consumers.gateway.posts import GZIPPED, IN_MEMORY, HeldBytes
from shmbridge.consumers.gateway.proof import carrier_of
from shmbridge.consumers.gateway.taker import NotRegistered
from shmbridge.consumers.gateway.upstream import NoSuchThing
from shmbridge.control import RequestRefused
from shmbridge.errors import NoWeight

log = logging.getLogger(__name__)

_POSTS = ("/scored_data", "/scored_data_list")
_RETRY_S = "1"
_SMALL = 1000
_BARE_EXAMPLE = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs", "messages", "images")
_NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}


def _utf8(text: str) -> str:
    text.encode()  # half a surrogate pair is a ValueError; what is kept must be said again
    return text


_Count = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]  # what is beyond cannot be said to a hub
_Text = Annotated[str, AfterValidator(_utf8)]


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
    """An environment's wish."""

    max_token_length: _Count
    desired_name: _Text
    weight: float
    group_size: _Count
    min_batch_allocation: float | None = None


class EnvIdentifier(BaseModel):
    """An environment's number."""

    env_id: _Count


class Refusals:
    """How many requests were refused, and why."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def answer(self, refused: Refused) -> Response:
        """The answer to a refused request."""
        self.counts[refused.kind] += 1
        headers = {"retry-after": _RETRY_S} if refused.status == 503 else {}
        if refused.status == 401:
            headers["www-authenticate"] = "Bearer"
        if refused.status == 408:
            headers["connection"] = "close"  # what comes late is no request
        return _json({"detail": refused.detail}, status=refused.status, headers=headers)


class Timing:
    """How long posts and batches take, as `api_perf/...`, where shmbridge.metrics is there to count it."""

    def __init__(self) -> None:
        self._window: Any = None
        if find_spec("shmbridge.metrics") is not None:
            self._window = import_module("shmbridge.metrics").LatencyWindow()

    def add(self, scope: Any, items: int = 1, failed: bool = False) -> None:
        """A request is answered now."""
        if self._window is not None:
            self._window.add(time.monotonic() - scope["arrived_s"], items=items, failed=failed)

    def metrics(self) -> dict[str, float]:
        """The figures; none before the first request."""
        return self._window.metrics() if self._window is not None else {}


class Gate:
    """ASGI middleware. Whoever comes on a connection has read what was said there before; who may not, or says too much, is refused.

    A body is whole and gunzipped when a route sees it. A post's body is read only when there is room for it.
    """

    def __init__(self, app: Any, options: GatewayOptions, refusals: Refusals, held: HeldBytes) -> None:
        self._app, self._options, self._refusals, self._held = app, options, refusals, held
        self._token = f"Bearer {options.token}".encode() if options.token else b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        carrier_of(scope).next_request()
        headers = dict(scope["headers"])
        reserved = [0]
        scope["arrived_s"] = time.monotonic()
        try:
            if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
                raise Refused(403, "pages of other sites have no business here", "browser")
            if self._token and not hmac.compare_digest(headers.get(b"authorization", b""), self._token):
                raise Refused(401, "this gateway wants a bearer token", "token")
            body = await self._body(scope, headers, receive, reserved)
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        except Refused as refused:
            await self._refusals.answer(refused)(scope, receive, send)
        finally:
            self._held.release(reserved[0])

    async def _body(self, scope: Any, headers: dict[bytes, bytes], receive: Any, reserved: list[int]) -> bytes | None:
        """The body, gunzipped; None if the peer has gone meanwhile."""
        most = self._options.max_body_bytes
        length = headers.get(b"content-length", b"0")
        announced = int(length) if length.isdigit() else 0
        if b"transfer-encoding" in headers:
            announced = most  # it may become as large as that, and nobody can tell before
        if announced > most:
            raise Refused(413, f"the body has {announced} bytes, at most {most} are taken", "too large")
        is_post = scope["path"] in _POSTS
        if is_post:
            zipped = b"gzip" in headers.get(b"content-encoding", b"").lower()
            cost = IN_MEMORY * min(most, announced * (GZIPPED if zipped else 1))
            if not await self._held.acquire(cost, self._options.post_deadline_s):
                raise Refused(503, f"posts that wait for room have {self._held.held} bytes of memory already", "held bytes")
            reserved[0] = cost
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            try:
                async with asyncio.timeout(self._options.body_pause_s):
                    message = await receive()
            except TimeoutError:
                said = f"nothing more of the body has come for {self._options.body_pause_s:g} s, after {size} bytes"
                raise Refused(408, said, "stalled") from None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > most:
                raise Refused(413, f"the body is more than {most} bytes", "too large")
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if body and b"gzip" in headers.get(b"content-encoding", b"").lower():
            body = await asyncio.to_thread(bodies.gunzip, body, most)
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in (b"content-encoding", b"content-length")]
        if is_post:
            self._held.grow(IN_MEMORY * len(body) - reserved[0])
            reserved[0] = IN_MEMORY * len(body)
        return body


def _replay(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """`receive` that begins with a body that was read already."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again


def make_app(mode: Mode) -> FastAPI:
    """The application of one gateway, which must be open while it serves."""
    options = mode.options
    refusals, held, timing = Refusals(), HeldBytes(options.held_bytes), Timing()
    strict = options.compat == "strict"
    parsers = ThreadPoolExecutor(2, "shmbridge-gateway-parser")
    app = FastAPI(title="shmbridge gateway", strict_content_type=False)
    app.add_middleware(Gate, options=options, refusals=refusals, held=held)

    @app.exception_handler(Refused)
    async def refused(request: Request, refused: Refused) -> Response:
        return refusals.answer(refused)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, wrong: RequestValidationError) -> Response:
        refusals.counts["malformed"] += 1
        return _json({"detail": [{key: each[key] for key in ("type", "loc", "msg")} for each in wrong.errors()]}, 422)

    @app.exception_handler(ShmBridgeError)
    async def failed(request: Request, error: ShmBridgeError) -> Response:
        status = 409 if isinstance(error, ConsumerTaken) else 422 if isinstance(error, RequestRefused) else 503
        return refusals.answer(Refused(507 if isinstance(error, BatchTooBig) else status, str(error), type(error).__name__))

    @app.get("/")
    async def root() -> Any:
        return {"message": "AtroposLib API"} if strict else {"message": "shmbridge gateway", "bridge": options.bridge}

    @app.post("/register")
    async def register(registration: Registration) -> Any:
        await mode.register(Run(**registration.model_dump()))
        return {"uuid": uuid.uuid4().int}

    @app.post("/register-env")
    async def register_env(wish: RegisterEnv) -> Any:
        return await mode.register_env(wish.model_dump())

    @app.post("/disconnect-env")
    async def disconnect_env(which: EnvIdentifier) -> Any:
        return await mode.disconnect_env(which.env_id)

    @app.get("/wandb_info")
    async def wandb_info() -> Any:
        run = await mode.run()
        if run is None or (strict and run.batch_size == -1):
            return {"group": None, "project": None}
        return {"group": run.wandb_group, "project": run.wandb_project}

    @app.get("/info")
    async def info() -> Any:
        run = await mode.run()
        return {"batch_size": run.batch_size if run else -1, "max_token_len": run.max_token_len if run else -1}

    @app.get("/status")
    async def status() -> Any:
        return await mode.status()

    @app.get("/status-env")
    async def status_env(which: EnvIdentifier) -> Any:
        try:
            return await mode.env_status(which.env_id)
        except (IndexError, NoWeight):
            return _failed()

    @app.get("/batch")
    async def batch(request: Request) -> Response:
        gzip = "gzip" in request.headers.get("accept-encoding", "").lower()
        try:
            found = await mode.batch(carrier_of(request.scope), gzip)
        except NotRegistered:
            return _json(_NOT_REGISTERED)
        except NoSuchThing:
            return _failed()
        if found is None:
            return _json({"batch": None})
        return Response(found.body, media_type="application/json", headers={"content-encoding": "gzip"} if gzip else {})

    @app.get("/latest_example")
    async def latest_example(request: Request) -> Response:
        group = await mode.latest()
        if group is None:
            return _json({name: [] for name in _BARE_EXAMPLE})
        full = group if set(KEYS) <= set(group) else {name: group.get(name) for name in KEYS} | group.get("extra", {})
        return _json(full)

    async def take(request: Request, many: bool) -> list[int | None]:
        body = await request.body()
        loop = asyncio.get_running_loop()
        posted = await loop.run_in_executor(parsers, lambda: bodies.read_post(body, many=many, extras=not strict))
        items, failed = sum(len(group["tokens"]) for group in posted.groups), True
        try:
            outcomes = await mode.post(posted, carrier_of(request.scope), time.monotonic() - request.scope["arrived_s"])
            failed = False
        finally:
            timing.add(request.scope, items, failed)
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
        await mode.reset()
        return PlainTextResponse("Reset successful")

    @app.get("/stats")
    async def stats() -> Response:
        reasons = {f"refused_total{{{kind}}}": count for kind, count in sorted(refusals.counts.items())}
        return _json({**mode.stats(), **reasons, "refused_total": refusals.counts.total(), "held_bytes": held.held, **timing.metrics()})

    return app


def _json(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


def _failed() -> Response:
    return PlainTextResponse("Internal Server Error", 500)
