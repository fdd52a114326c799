"""Makes vLLM's own OpenAI server follow a bridge, and answer environments in Atropos' form.

    python -m vllm.entrypoints.openai.api_server --model ... --weight-transfer-config '{"backend":
    "shmbridge"}' \\
        --middleware shmbridge.consumers.vllm.middleware.ShmBridge --additional-config '{"shmbridge":
        {"bridge": "run1", "pause": "keep"}}'

vLLM loads this class by name; no vLLM code is replaced. `follow.py` loads new versions, `atropos_generate.py`
serves `/generate`.
"""

from __future__ import annotations

import hmac
import logging
import os
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shmbridge.consumers.vllm import atropos_generate
from shmbridge.consumers.vllm.atropos_generate import Json
from shmbridge.consumers.vllm.follow import Follower
from shmbridge.consumers.vllm.follow_settings import FollowSettings, follow_settings
from shmbridge.consumers.vllm.live_engine import LiveEngine
from shmbridge.consumers.vllm.plugin import BACKEND
from shmbridge.consumers.vllm.stamped import stamped, version_header
from shmbridge.errors import BadConfig, ShmBridgeError
from shmbridge.httpd.door import Bounds, Headers, Refused
from shmbridge.httpd.gate import Gate, HeldBytes, Takes, json_answer, openai_error, unless_gone
from shmbridge.weights import WeightsReader

# below vLLM's logger, since vLLM's logging configures no other names
logger = logging.getLogger("vllm.shmbridge")

BODY_LIMIT = 64 << 20  # bytes; a prompt of a million token ids is below 8 MiB
_HELD_BYTES = 4 * BODY_LIMIT  # memory of all bodies that are read


class ShmBridge:
    """ASGI middleware for `--middleware` of vLLM's server.

    It serves `POST /generate` and `GET /policy_version`, and passes on all other requests. Before the server
    listens, the engine loads the newest version of the bridge, if any. Of several API servers on one engine
    only the first follows.

    Args:
        app: vLLM's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._state: Any = None  # vLLM's app.state, which it deletes from the app before the middleware ends
        self._settings: FollowSettings | None = None
        self._follower: Follower | None = None
        takes = Takes(BODY_LIMIT, HeldBytes(_HELD_BYTES, in_line=False))
        self._gate = Gate(
            self._generate,
            check=self._check,
            takes=lambda path, method: takes,
            refused=openai_error,
            bounds=Bounds(),
        )

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
        if not atropos_generate.reports_versions():
            logger.warning(
                "this vLLM does not report which version sampled which token, as 0.32 does: /generate bounds "
                "them by weight_version and oldest_weight_version; only an answer that no update fell into "
                "has versions per token"
            )

    # --- requests
    # --------------------------------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._state is None:  # a server without a lifespan
            await self._begin(scope["app"].state)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        match scope["method"], path:
            case "POST", "/generate":
                await self._gate(scope, receive, send)
            case "GET", "/policy_version":
                response = json_answer(self._policy_version(), headers=version_header(self._version()))
                await response(scope, receive, send)
            case _:
                await self._app(scope, receive, stamped(send, path, self._version))

    def _version(self) -> int | None:
        return None if self._follower is None else self._follower.version

    def _policy_version(self) -> Json:
        stats = {} if self._follower is None else msgspec.to_builtins(self._follower.stats())
        settings = msgspec.to_builtins(self._settings)
        return {"version": None, "follows": self._follower is not None, **settings, **stats}

    def _check(self, header: Headers) -> None:
        """Refuses a request without one of the server's keys, if it has any."""
        keys = self._state.args.api_key or [os.environ.get("VLLM_API_KEY")]
        known = [key.encode() for key in keys if key]
        scheme, _, token = header("authorization").partition(" ")
        if known and not (
            scheme.lower() == "bearer" and any(hmac.compare_digest(token.encode(), key) for key in known)
        ):
            detail = "this server wants Authorization: Bearer with one of its API keys"
            raise Refused(401, detail, "token")

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = self._state.engine_client
        try:
            models = [base.name for base in self._state.openai_serving_models.base_model_paths]
            asked = atropos_generate.question((await receive())["body"], models)
            scope["booking"].release()
            oldest = self._version()
            body = await unless_gone(atropos_generate.generate(client, asked), receive)
            if None in body["weight_versions"]:  # bounds of the tokens' versions, as on the OpenAI routes
                body |= {"weight_version": self._version(), "oldest_weight_version": oldest}
        except ClientDisconnect:
            return
        except Refused:
            raise
        except Exception as error:
            # keep serving: log the traceback, send the client the reason
            status = 503 if client.errored else int(getattr(error, "http_status", 500))
            if status == 500:
                logger.exception("POST /generate failed")
            raise Refused(status, f"{type(error).__name__}: {error}", "failed") from None
        await json_answer(body, headers=version_header(body["weight_version"]))(scope, receive, send)
