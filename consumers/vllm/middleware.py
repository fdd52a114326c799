"""Makes vLLM's own OpenAI server follow a bridge, and answer environments in Atropos' form.

    python -m vllm.entrypoints.openai.api_server --model ... --weight-transfer-config '{"backend":
    "shmbridge"}' \
        --middleware shmbridge.consumers.vllm.middleware.ShmBridge --additional-config '{"shmbridge":
        {"bridge": "run1", "pause": "keep"}}'

vLLM loads this class by name; no vLLM code is replaced. `follow.py` loads new versions, `py`
serves `/generate`.
"""

from __future__ import annotations

import hmac
import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shmbridge.consumers.vllm.follow import Follower, FollowSettings, LiveEngine, follow_settings
from shmbridge.consumers.vllm.plugin import BACKEND
from shmbridge.errors import BadConfig, ShmBridgeError
from shmbridge.httpd.door import BadRequest, Bounds, Headers, Refused
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
        if not reports_versions():
            logger.warning(
                "this vLLM does not report which version sampled which token, as 0.32 does: /generate bounds "
                "them by weight_version and oldest_weight_version; only an answer that no update fell into "
                "has versions per token"
            )

    # --- requests

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
            asked = question((await receive())["body"], models)
            scope["booking"].release()
            oldest = self._version()
            body = await unless_gone(generate(client, asked), receive)
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


Version = Callable[[], int | None]

_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


def version_header(version: int | None) -> dict[str, str]:
    """Returns the header `X-Policy-Version`, or nothing for an unknown version."""
    return {} if version is None else {"x-policy-version": str(version)}


def stamped(send: Send, path: str, version: Version) -> Send:
    """Returns a `send` that adds the version to the response for a request that has just arrived.

    Args:
        send: of the request.
        path: of the request.
        version: returns the version of tokens generated now.
    """
    oldest = version()
    held: list[Message] = []  # the start of a response whose length will change, and its body so far

    async def send_stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            if header := version_header(version()):
                message = {"headers": [], **message}
                headers = MutableHeaders(scope=message)
                headers.update(header)
                is_json = headers.get("content-type", "").startswith("application/json")
                if path in _COMPLETIONS and message["status"] == 200 and is_json:
                    held.append(message)
                    return
        elif held and message["type"] == "http.response.body":
            held.append(message)
            if message.get("more_body", False):
                return
            raw = b"".join(part.get("body", b"") for part in held[1:])
            raw = _with_versions(raw, version(), oldest)
            MutableHeaders(scope=held[0])["content-length"] = str(len(raw))
            await send(held[0])
            held.clear()
            message = {"type": "http.response.body", "body": raw}
        await send(message)

    return send_stamped


def _with_versions(raw: bytes, newest: int | None, oldest: int | None) -> bytes:
    """Returns the JSON object with two fields appended; null stands for an unknown version."""
    body = raw.rstrip()
    if not body.endswith(b"}") or body == b"{}":
        return raw
    fields = b',"weight_version":%s,"oldest_weight_version":%s}' % (_json(newest), _json(oldest))
    return body[:-1] + fields


def _json(version: int | None) -> bytes:
    return b"null" if version is None else b"%d" % version


Json = dict[str, Any]
_UNKNOWN = {"version": "unknown"}
_LOWEST = -9999.0  # JSON has no minus infinity; vLLM's own responses use this value


class PromptTokens(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt in token ids."""

    prompt_token_ids: list[int]


Count = Annotated[int, Meta(ge=1)]


class Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body: a prompt, and fields of vLLM's SamplingParams, for which null means the default."""

    prompt: str | PromptTokens
    model: str | None = None
    stream: bool | None = None

    n: Count | None = None
    max_tokens: Count | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def sampling(self) -> Json:
        """Returns the given fields that belong to SamplingParams."""
        given = msgspec.structs.asdict(self)
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in ("prompt", "model", "stream")
        }


def question(raw: bytes | bytearray, models: Collection[str]) -> Question:
    """Parses a request body; `models` are the names under which the engine's model is served.

    Raises BadRequest: invalid JSON, an unknown field, another model, or a stream.
    """
    try:
        asked = msgspec.json.decode(raw, type=Question)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(str(error)) from error
    if asked.stream:
        raise BadRequest(
            "stream = true is not supported: an answer is sent whole, with the versions of its tokens"
        )
    if asked.model is not None and asked.model not in models:
        raise BadRequest(f"model {asked.model!r} is not served here; served are {', '.join(sorted(models))}")
    return asked


def reports_versions() -> bool:
    """Whether this vLLM reports which version sampled which token, as 0.32 does. Never blocks."""
    from vllm.outputs import CompletionOutput

    return hasattr(CompletionOutput, "weight_versions")


async def generate(client: Any, asked: Question) -> Json:
    """Runs a request on vLLM's AsyncLLM and returns the response; raises BadRequest if the engine refuses it.

    Awaits the last token; cancelling it aborts the request in the engine.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    final: Any = None
    try:
        params = SamplingParams(**asked.sampling(), output_kind=RequestOutputKind.FINAL_ONLY)
        async with aclosing(
            client.generate(msgspec.to_builtins(asked.prompt), params, uuid.uuid4().hex)
        ) as outputs:
            async for output in outputs:
                final = output
    except (VLLMClientError, ValueError, TypeError) as error:
        raise BadRequest(str(error)) from error
    except Exception as error:  # the engine wraps errors of its prompt checks
        if isinstance(error.__cause__, (ValueError, TypeError)):
            raise BadRequest(str(error.__cause__)) from error
        raise
    assert final is not None  # a request ends with an output, or raises
    return answer(final, client.tokenizer)


def answer(final: Any, tokenizer: Any) -> Json:
    """Returns the body for a finished RequestOutput.

    `logprobs` is, per completion and token, `[{token id: log-probability}]`, with the sampled token first.
    `weight_versions` is, per completion, the spans `[start, end)` of its tokens and the version that sampled
    them; null if the engine does not report it, as before vLLM 0.32.
    """
    outputs = final.outputs
    prompt_tokens = list(final.prompt_token_ids or ())
    prompt = final.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(prompt_tokens)
    spans = [_spans(getattr(output, "weight_versions", None)) for output in outputs]  # from 0.32
    body: Json = {
        "text": [output.text for output in outputs],
        "prompt": prompt,
        "finish_reasons": [output.finish_reason for output in outputs],
        "prompt_token_ids": prompt_tokens,
        "token_ids": [list(output.token_ids) for output in outputs],
        "weight_versions": spans,
        "weight_version": newest(spans),
    }
    if all(output.logprobs is not None for output in outputs):
        body["logprobs"] = [[[_plain(entry)] for entry in output.logprobs] for output in outputs]
    if final.prompt_logprobs is not None:
        body["prompt_logprobs"] = [
            None if entry is None else _plain(entry) for entry in final.prompt_logprobs
        ]
    return body


def _plain(entry: Mapping[int, Any]) -> dict[int, float]:
    return {token: max(chance.logprob, _LOWEST) for token, chance in entry.items()}


def _spans(versions: Sequence[Any] | None) -> list[Json] | None:
    if versions is None:
        return None
    return [{"version": span.version, "start": span.start, "end": span.end} for span in versions]


def newest(answers: Iterable[list[Json] | None]) -> int | None:
    """Returns the newest version of all spans; None if any of them is unknown, or there is none."""
    labels = [span["version"] for spans in answers for span in ([_UNKNOWN] if spans is None else spans)]
    return max(map(int, labels), default=None) if all(label.isdecimal() for label in labels) else None
