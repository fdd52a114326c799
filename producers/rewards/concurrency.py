"""Bounds how many calls of an event loop are under way, and calls what users give in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar
from weakref import WeakKeyDictionary

from shmbridge.errors import BadArgument

Item = TypeVar("Item")
Result = TypeVar("Result")


def contained(error: BaseException, whose: str) -> Exception:
    """Returns an error that ends only its caller: StopIteration would never arrive in an event loop, and
    SystemExit would end it.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{whose} ended with {error!r}")


async def in_thread(function: Callable[[Item], Result], item: Item, whose: str) -> Result:
    """Returns what a function gives, called in a thread. Raises what it raises, contained."""

    def called() -> Result:
        try:
            return function(item)
        except BaseException as error:
            if (told := contained(error, whose)) is error:
                raise
            raise told from error

    return await asyncio.to_thread(called)


class Limit:
    """At most so many calls at the same time, in each event loop."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise BadArgument(f"most_at_once={most} is less than 1", hint="most_at_once=16")
        self._most = most
        self._per_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def all(self, call: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
        """Returns the results in the order of the items; the first error ends the other calls."""
        turn = self._per_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._most))

        async def one(item: Item) -> Result:
            async with turn:
                return await call(item)

        tasks = [asyncio.ensure_future(one(item)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
