"""Replaces `aiohttp.ClientSession` where Atropos' `BaseEnv` calls its rollout server.

BaseEnv keeps its own logic (retries, waiting, use of each answer); only the transport differs.
Used by BaseEnv, after `shmbridge.producers.atropos.attach`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from shmbridge.producers.atropos.control_link import EnvLink


class RolloutSession:
    """`async with RolloutSession(link) as session, session.get(url) as response: await response.json()`."""

    def __init__(self, link: EnvLink) -> None:
        self._link = link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    def get(self, url: str, *, json: Any = None) -> _Response:
        """Asks one of the routes; the request is sent when the response is entered."""
        link = self._link
        routes: dict[str, Callable[[], Awaitable[Mapping[str, Any]]]] = {
            "wandb_info": link.wandb_info,
            "register-env": lambda: link.register(json or {}),
            "info": link.info,
            "status-env": link.status,
            "scored_data": lambda: _sent(link, [json]),
            "scored_data_list": lambda: _sent(link, json),
        }
        route = url.rpartition("/")[2]
        if route not in routes:
            raise LookupError(
                f"BaseEnv asks for {url}, which a bridge does not answer; it answers {sorted(routes)}"
            )
        return _Response(routes[route])

    post = get  # routes differ by name, not by method


async def _sent(link: EnvLink, groups: Any) -> Mapping[str, Any]:
    await link.send(groups)
    return {"status": "received"}


class _Response:
    """As much of `aiohttp.ClientResponse` as BaseEnv uses; always a success: the link's answer says what to
    do.
    """

    status = 200

    def __init__(self, ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._ask = ask
        self._answer: Mapping[str, Any] = {}

    async def __aenter__(self) -> Self:
        self._answer = await self._ask()
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    def raise_for_status(self) -> None:
        """Nothing to raise."""

    async def json(self) -> Mapping[str, Any]:
        """Returns the answer."""
        return self._answer

    async def text(self) -> str:
        """Returns the answer as BaseEnv logs it."""
        return json.dumps(self._answer)
