"""HTTP on starlette: a body within a limit, JSON responses, the end of a request whose client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

Json = dict[str, Any]
Result = TypeVar("Result")

BODY_LIMIT = 64 << 20  # bytes; a prompt of a million token ids is below 8 MiB


class BodyTooLong(ValueError):
    """The body is longer than `BODY_LIMIT`."""


async def read_body(request: Request) -> bytes:
    """Returns the whole body. Raises ClientDisconnect, and BodyTooLong beyond `BODY_LIMIT`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_LIMIT:
            raise BodyTooLong(f"the body has more than {BODY_LIMIT} bytes")
    return bytes(body)


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Returns the result of `work`; if the client disconnects, cancels it and raises ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(body: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(status: int, kind: str, message: str) -> Response:
    """Returns an error in the form of the OpenAI API."""
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)
