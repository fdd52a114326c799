"""Waits in an event loop for what others do."""

import asyncio
from collections.abc import Callable
from typing import Any


async def until(holds: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Returns the result of `holds` once that is true; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not (value := holds()):
            await asyncio.sleep(0.01)
    return value
