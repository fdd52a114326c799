"""Makes vLLM's own OpenAI server follow a bridge, and answer environments in Atropos' form.

    python -m vllm.entrypoints.openai.api_server --model ... --weight-transfer-config '{"backend":
    "shmbridge"}' \\
        --middleware shmbridge.consumers.vllm.middleware.ShmBridge --additional-config '{"shmbridge":
        {"bridge": "run1", "pause": "keep"}}'

vLLM loads this class by name; no vLLM code is replaced. `follow.py` loads new versions, `atropos_generate.py`
serves `/generate`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Collection
from typing import Any

import msgspec

from shmbridge.consumers.vllm import atropos_generate
from shmbridge.consumers.vllm.asgi import (
    App,
    BodyTooLong,
    ClientGone,
    Json,
    Message,
    Receive,
    Scope,
    Send,
    read_body,
    send_error,
    send_json,
    unless_gone,
)
from shmbridge.consumers.vllm.follow import Follower
from shmbridge.consumers.vllm.follow_settings import FollowSettings, follow_settings
from shmbridge.consumers.vllm.live_engine import LiveEngine
from shmbridge.consumers.vllm.plugin import BACKEND
from shmbridge.consumers.vllm.stamped import stamped, version_header
from shmbridge.errors import BadConfig, ShmBridgeError
from shmbridge.weights import WeightsReader

# below vLLM's logger, since vLLM's logging configures no other names
logger = logging.getLogger("vllm.shmbridge")


class ShmBridge:
    """ASGI middleware for `--middleware` of vLLM's server.

    It serves `POST /generate` and `GET /policy_version`, and passes on all other requests. Before the server
    listens, the engine loads the newest version of the bridge, if any. Of several API servers on one engine
    only the first follows.

    Args:
        app: vLLM's.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._state: Any = None  # vLLM's app.state, which it deletes from the app before the middleware ends
        self._settings: FollowSettings | None = None
        self._follower: Follower | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    # --- beginning and end
    # --------------------------------------------------------------------------------------------------------

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_when_followed(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await self._begin(scope["app"].state)
                except (ShmBridgeError, OSError) as error:
                    message = {"type": "lifespan.startup.failed", "message": str(error)}
            await send(message)

        try:
            await self._app(scope, receive, send_when_followed)
        finally:
            if self._follower is not None:
                await self._follower.close()

    async def _begin(self, state: Any) -> None:
        config = state.vllm_config
        self._state = state
        self._settings = settings = follow_settings(config.additional_config)
        transfer = config.weight_transfer_config
        if transfer is None or transfer.backend != BACKEND:
            raise BadConfig(
                f"vLLM's workers cannot take weights from bridge {settings.bridge!r}",
                hint="""give the server --weight-transfer-config '{"backend": "shmbridge"}'""",
            )
        if config.parallel_config._api_process_rank > 0:
            return
        engine = LiveEngine(state.engine_client, settings, config.parallel_config.data_parallel_size)
        self._follower = Follower(WeightsReader(settings.bridge), engine)
        await self._follower.start()
        logger.info(
            "bridge %s is followed, pause mode %s, policy version %s",
            settings.bridge,
            settings.pause,
            self._version(),
        )

    # --- requests
    # --------------------------------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._state is None:  # a server without a lifespan
            await self._begin(scope["app"].state)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        match scope["method"], path:
            case "POST", "/generate":
                await self._generate(scope, receive, send)
            case "GET", "/policy_version":
                await send_json(send, self._policy_version(), headers=version_header(self._version()))
            case _:
                await self._app(scope, receive, stamped(send, path, self._version))

    def _version(self) -> int | None:
        return None if self._follower is None else self._follower.version

    def _policy_version(self) -> Json:
        stats = {} if self._follower is None else msgspec.to_builtins(self._follower.stats())
        settings = msgspec.to_builtins(self._settings)
        return {"version": None, "follows": self._follower is not None, **settings, **stats}

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        if not _allowed(scope, state.args.api_key or [os.environ.get("VLLM_API_KEY")]):
            await send_error(
                send, 401, "unauthorized", "this server wants Authorization: Bearer with one of its API keys"
            )
            return
        try:
            models = [base.name for base in state.openai_serving_models.base_model_paths]
            asked = atropos_generate.question(await read_body(receive), models)
            body = await unless_gone(atropos_generate.generate(state.engine_client, asked), receive)
        except ClientGone:
            return
        except BodyTooLong as error:
            await send_error(send, 413, "invalid_request_error", str(error))
        except atropos_generate.BadRequest as error:
            await send_error(send, 400, "invalid_request_error", str(error))
        except Exception as error:
            # keep serving: log the traceback, send the client the reason
            status = 503 if state.engine_client.errored else int(getattr(error, "http_status", 500))
            if status == 500:
                logger.exception("POST /generate failed")
            await send_error(send, status, "internal_error", f"{type(error).__name__}: {error}")
        else:
            await send_json(send, body, headers=version_header(body["weight_version"]))


def _allowed(scope: Scope, keys: Collection[str | None]) -> bool:
    """Returns whether a request has one of the server's keys; True if the server has none."""
    known = [_digest(key) for key in keys if key]
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode(
        "latin-1"
    )
    scheme, _, token = given.partition(" ")
    return not known or (
        scheme.lower() == "bearer" and any(hmac.compare_digest(_digest(token), key) for key in known)
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
