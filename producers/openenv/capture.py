"""OpenEnv's capture proxy in front of an inference server: `Capture`, which notes the version of each token.

Any agent that speaks chat completions, Anthropic messages, Responses or Google's API is pointed at its
address with the id of a session as API key; the proxy is OpenEnv's own, unchanged. What it lacks, the policy
version of each token, is read from the server's answers: `noting` hears them in the task of their request,
and the graph of the session, in the same task, keeps them beside the call. Written against openenv 0.10.0.
"""

from __future__ import annotations

import asyncio
import secrets
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
from openenv.core.harness.capture.server import UpstreamPool, create_app
from openenv.core.harness.capture.sessions import Session, SessionRegistry
from openenv.core.harness.capture.validate_llm import list_models, validate_llm

from shmbridge.httpd.door import Bounds, Headers
from shmbridge.httpd.server import LoopServer
from shmbridge.producers.rollout import NoTokens, ServerFailed
from shmbridge.producers.rollout.sampling import Span, completions_in

# A request's body is held until it is answered: the next waits for room as long as an answer may take.
_BOUNDS = Bounds(body_bytes=64 << 20, bodies_bytes=256 << 20, room_s=600.0)
_UNKNOWN = -1

_spans: ContextVar[tuple[Span, ...]] = ContextVar("versions_of_the_answer", default=())


def noting(client: Any) -> Any:
    """Makes a client of OpenEnv note which versions sampled its answers, for the task that asked.

    Args:
        client: an `InferenceClient`. Once is enough; again changes nothing.

    Returns:
        The client itself.
    """
    if getattr(client, "notes_versions", False):
        return client
    ask = client.completion

    async def completion(request: dict[str, Any]) -> dict[str, Any]:
        _spans.set(())
        answer: dict[str, Any] = await ask(request)
        said = completions_in(answer)
        _spans.set(said[0].spans if len(said) == 1 else ())
        return answer

    client.completion, client.notes_versions = completion, True
    return client


class VersionedGraph(RolloutGraph):
    """The calls of a session, and in `versions`, by a call's node id, the version of each sampled token."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, list[int]] = {}

    def add_turn(self, node: TurnNode) -> TurnNode:
        """Adds a call; in the task that asked the server."""
        versions = [_UNKNOWN] * len(node.sampled_ids)
        for version, start, end in _spans.get():
            versions[start:end] = [version] * (min(end, len(versions)) - start)
        self.versions[node.node_id] = versions
        return super().add_turn(node)


class _Sessions(SessionRegistry):
    def __init__(self, most_calls: int) -> None:
        super().__init__()
        self._most_calls = most_calls

    def create(self, session_id: str | None = None, **options: Any) -> Session:
        options["max_model_calls"] = options.get("max_model_calls") or self._most_calls
        session = super().create(session_id, **options)
        if not isinstance(session.graph, VersionedGraph):
            session.graph = VersionedGraph()
        return session


class _Engines(UpstreamPool):
    async def resolve(self, upstream: Any) -> tuple[Any, str]:
        client, level = await super().resolve(upstream)
        return noting(client), level


class Capture:
    """The proxy, served by the running event loop. An async context manager, or `start` and `close`.

    Every answer is whole, and of one session; sessions are in `registry`, whose graphs have `versions`.

    Args:
        server: address of the inference server, which must give token ids and log-probabilities of chat
            completions, as vLLM (`--logprobs-mode processed_logprobs`) and the policy server do.
        model: its name for the model; None: the first that it lists.
        host, port: where agents ask; a sandbox that is no part of this machine needs another host than
            127.0.0.1. Port 0: a free one.
        api_key: of the inference server.
        max_output_tokens: most tokens of one answer.
        max_calls: calls of one session, after which the proxy ends the agent's loop; 0: no limit.

    Attributes:
        url: what agents get as base URL, without `/v1`.
        model: see there.
        registry, inference: OpenEnv's session registry and client, for what is called with them.
        admin_key: opens the routes `/sessions`; new each time.
    """

    def __init__(
        self,
        server: str,
        model: str | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        max_output_tokens: int = 8192,
        max_calls: int = 0,
    ) -> None:
        self.server, self.model = server, model or ""
        self.admin_key = secrets.token_hex(16)
        self._host, self._port, self._api_key = host, port, api_key
        self._most_tokens, self._most_calls = max_output_tokens, max_calls
        self._proxy: LoopServer | None = None
        self.registry, self.inference, self.url = _Sessions(max_calls), None, ""

    async def start(self) -> None:
        """Asks the inference server what it can, and begins to serve.

        Raises:
            ServerFailed: it cannot be reached, or does not serve the model.
            NoTokens: it gives no token ids, or log-probabilities that are not those of sampling.
        """
        await asyncio.to_thread(self._check)
        app = create_app(
            llm_url=self.server,
            model=self.model,
            max_output_tokens=self._most_tokens,
            api_key=self._api_key,
            admin_key=self.admin_key,
            max_model_calls=self._most_calls,
        )
        self.inference = noting(app.state.inference)
        app.state.registry = self.registry
        app.state.upstreams = _Engines(default_client=self.inference, default_level="tokens")
        self._proxy = LoopServer(
            app,
            check=_anybody,
            reads=lambda path, method: method in ("POST", "DELETE"),
            bounds=_BOUNDS,
            host=self._host,
            port=self._port,
        )
        await self._proxy.start()
        self.url = self._proxy.url

    async def close(self) -> None:
        """Ends serving, and closes the connections to the inference server."""
        if self._proxy is not None:
            await self._proxy.close()
        if self.inference is not None:
            await self.inference.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def document(self, session: Session) -> dict[str, Any]:
        """Returns what OpenEnv exports of a session, messages included. Never blocks."""
        return dict(export_session(session, include_messages=True, capture_level="tokens"))

    def _check(self) -> None:
        model = self.model or next(iter(list_models(self.server, api_key=self._api_key)), "")
        if not model:
            raise ServerFailed(
                f"{self.server} cannot be reached, or lists no model", hint="start it, or give model="
            )
        report = validate_llm(self.server, model, api_key=self._api_key, check_tools=False)
        if not report.reachable:
            raise ServerFailed(report.summary(), hint="see the server's log")
        if report.capture_level != "tokens":
            raise NoTokens(
                report.summary(), hint="serve with token ids and log-probabilities of what was sampled"
            )
        self.model = model


def _anybody(header: Headers) -> None:
    """Whoever has a session's id may ask; the application looks at it."""
