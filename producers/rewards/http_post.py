"""Posts JSON to a server of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmbridge.producers.rewards.errors import RewardsFailed


async def post_json(url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> Any:
    """Returns the answer's JSON. Never blocks the event loop.

    Raises:
        RewardsFailed: no answer, none in time, a status other than 200, or no JSON.
    """
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.post(url, json=body, headers=dict(headers)) as answer,
        ):
            if answer.status != 200:
                raise RewardsFailed(f"{url} answers {answer.status}: {(await answer.text())[:300]}")
            return await answer.json(content_type=None)
    except TimeoutError as late:
        raise RewardsFailed(f"{url} did not answer within {timeout_s:g} s") from late
    except (aiohttp.ClientError, ValueError) as wrong:
        raise RewardsFailed(f"{url}: {wrong!r}", hint="does the reward server run?") from wrong
