"""Records inference servers' responses to a worker by hooks in aiohttp and in the OpenAI client.

Every worker has a ledger in its context, which its own tasks inherit; outside of workers (evaluation, health
checks) nothing is recorded. responses.py parses the responses, version_stamps.py uses them. Used by
`shmbridge.producers.atropos.patches`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from shmbridge.producers.atropos.response_index import Ledger
from shmbridge.producers.rollout.responses import completions_in

if TYPE_CHECKING:
    from shmbridge.producers.atropos.attribute_swaps import Changes

_ledger: ContextVar[Ledger | None] = ContextVar("completions_of_the_calling_worker", default=None)

# Ends of the paths that sample; other requests are not recorded.
_SAMPLING = ("/generate", "/completions")


@contextmanager
def listening() -> Iterator[None]:
    """For one worker: responses that it and its tasks receive within the block go into a new ledger."""
    ledger = Ledger()
    token = _ledger.set(ledger)
    try:
        yield
    finally:
        ledger.close()  # tasks it leaves behind keep the context
        _ledger.reset(token)


def heard() -> Ledger | None:
    """The ledger of the calling worker, also after its end; None outside of workers."""
    return _ledger.get()


def put_on_hooks(changes: Changes) -> None:
    """Begins to record, for workers in `listening` blocks; undoing the changes ends it. Never blocks."""
    from aiohttp import ClientResponse
    from atroposlib.envs.server_handling import openai_server, sglang_server, vllm_server
    from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
    from openai.resources.completions import AsyncCompletions

    changes.replace(ClientResponse, "json", _heard_json(ClientResponse.json))
    for client in (AsyncChatCompletions, AsyncCompletions):
        changes.replace(client, "create", _heard_create(client.create))
    # The first worker that asks a server starts its health checks, in its own context and for good.
    for server in (openai_server.OpenAIServer, sglang_server.SGLangServer, vllm_server.VLLMServer):
        changes.replace(server, "check_server_status_task", _unheard(server.check_server_status_task))


def _heard_json(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def json(response: Any, *args: Any, **options: Any) -> Any:
        body = await original(response, *args, **options)
        ledger = _ledger.get()
        if ledger is not None and response.ok and response.url.path.rstrip("/").endswith(_SAMPLING):
            ledger.note(completions_in(body))
        return body

    return json


def _heard_create(original: Callable[..., Any]) -> Callable[..., Any]:
    """The OpenAI API has no tokens.

    Servers of ours, known by earlier responses, are asked for them, as vLLM has it.
    """
    ours: WeakSet[Any] = WeakSet()

    @functools.wraps(original)
    async def create(resource: Any, *args: Any, **options: Any) -> Any:
        ledger = _ledger.get()
        if ledger is None:
            return await original(resource, *args, **options)
        if resource._client in ours:
            options["extra_body"] = {"return_token_ids": True, **(options.get("extra_body") or {})}
        completion = await original(resource, *args, **options)
        if getattr(completion, "oldest_weight_version", None) is not None:
            ours.add(resource._client)
        ledger.note(completions_in(completion))
        return completion

    return create


def _unheard(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def check(*args: Any, **options: Any) -> Any:
        token = _ledger.set(None)
        try:
            return await original(*args, **options)
        finally:
            _ledger.reset(token)

    return check
