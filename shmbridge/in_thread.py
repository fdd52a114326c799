"""A call that blocks, beside an event loop that goes on. Knows nothing of the package."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def to_its_end(call: Callable[..., Result], *args: Any, **named: Any) -> Result:
    """Returns what a call returns, or raises what it raises; a thread makes it, and the event loop goes on.

    A cancellation comes once the call is over: whatever it reads or writes is the caller's again.
    """
    running = asyncio.get_running_loop().run_in_executor(None, functools.partial(call, *args, **named))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from running.exception()
    return running.result()
