"""ASGI helpers: reading a body, sending JSON, detecting a disconnected client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any, TypeVar

import msgspec

Json = dict[str, Any]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
Result = TypeVar("Result")

BODY_LIMIT = 64 << 20  # bytes; a prompt of a million token ids is below 8 MiB


class ClientGone(Exception):
    """The client disconnected before the response."""


class BodyTooLong(ValueError):
    """The body is longer than `BODY_LIMIT`."""


async def read_body(receive: Receive) -> bytes:
    """Returns the whole body of a request.

    Raises:
        ClientGone: the client disconnected.
        BodyTooLong: it is longer than `BODY_LIMIT`.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > BODY_LIMIT:
            raise BodyTooLong(f"the body has more than {BODY_LIMIT} bytes")
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Returns the result of `work`. If the client disconnects, cancels it, waits for its end, and raises
    ClientGone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, body: Json, *, status: int = 200, headers: Iterable[Header] = ()) -> None:
    """Sends a whole response."""
    raw = msgspec.json.encode(body)
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": raw})


async def send_error(send: Send, status: int, kind: str, message: str) -> None:
    """Sends an error in the form of the OpenAI API."""
    await send_json(send, {"error": {"message": message, "type": kind, "code": status}}, status=status)
