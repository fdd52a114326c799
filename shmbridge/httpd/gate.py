"""ASGI middleware before the routes: who may ask, memory and time for bodies, gunzip, answers to refusals."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shmbridge.httpd.door import Bounds, Headers, Refused, content_length, stalled, too_large

Result = TypeVar("Result")

GZIPPED = 4  # bytes of JSON for a byte of it gzipped, rather more than it is
_STEP = 4  # times as much room is asked for when a gunzipped body turns out larger
_FIRST_STEP, _LAST_STEP = 256, 1 << 16  # bytes given to a member at a time: what it leaves is copied
_NONE = [b"0"]  # Content-Length of no body
_PADDING = re.compile(rb"\0*")  # may follow a member
_REFUSED_THERE = ("header", "method", "incorrect")  # zlib's words for what Python's gzip calls no gzip file


@dataclass(frozen=True)
class Takes:
    """How large bodies some routes take, and the memory that these share."""

    most: int  # bytes of one, gunzipped
    memory: HeldBytes
    room_s: float = 10.0  # longest wait for room in it
    in_memory: int = 1  # bytes of memory for a byte of body
    smaller: str = "send less at once"  # what to do about a body that is too large
    more_room: str = "send it again later"  # what to do where there is no room


class Gate:
    """Refuses what may not ask or is too large; gives the application the whole body, gunzipped.

    A body is read only if a route takes it and there is room. Its memory is held until the app returns, or
    calls `scope["booking"].release()`. `scope["arrived_s"]` is the monotonic time at which the request came.
    An app may raise Refused before it answers, and ClientDisconnect at any time, as `unless_gone` does.

    Args:
        app: the application; it gets all bodies in one message.
        check: raises Refused for who may not ask; before anything is read.
        takes: what is taken of a path and method; None: there is no such route, the body is not read.
        refused: makes the answer to a refusal.
        bounds: time for bodies.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        check: Callable[[Headers], None],
        takes: Callable[[str, str], Takes | None],
        refused: Callable[[Refused], ASGIApp],
        bounds: Bounds,
    ) -> None:
        self._app, self._check, self._takes, self._refused, self._bounds = app, check, takes, refused, bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        scope["arrived_s"] = time.monotonic()
        booking: Booking | None = None
        try:
            self._check(lambda name: b", ".join(headers.get(name.encode(), ())).decode("latin-1"))
            takes = self._takes(scope["path"], scope["method"])
            if takes is None:
                bare = b"transfer-encoding" not in headers and headers.get(b"content-length", _NONE) == _NONE
                await self._app(scope, receive if bare else no_body(), send)
                return
            booking = scope["booking"] = Booking(takes.memory)
            try:
                again = await self._whole(scope, headers, receive, booking, takes)
            except asyncio.CancelledError:  # the server ends, and has waited for bodies under way
                raise Refused(503, "the server ends -> send it again", "ending") from None
            if again is not None:
                await self._app(scope, again, send)
        except Refused as refused:
            await self._refused(refused)(scope, receive, send)
        except ClientDisconnect:
            return  # nobody waits for the answer
        finally:
            if booking is not None:
                booking.release()

    async def _whole(
        self,
        scope: Scope,
        headers: dict[bytes, list[bytes]],
        receive: Receive,
        booking: Booking,
        takes: Takes,
    ) -> Receive | None:
        """Returns a `receive` that begins with the whole body, gunzipped; None if the peer has gone."""
        deadline = time.monotonic() + takes.room_s
        lengths = [each.decode("latin-1") for each in headers.get(b"content-length", ())]
        announced = content_length(lengths, takes.most, takes.smaller)
        if b"transfer-encoding" in headers:
            announced = takes.most  # the body may grow to the limit, which is unknown in advance
        zipped = any(b"gzip" in each.lower() for each in headers.get(b"content-encoding", ()))
        room = min(takes.most, announced * (GZIPPED if zipped else 1))
        if room:
            await self._book(booking, takes, room, 0, deadline)
        body = sent = await self._read(receive, takes)
        if sent and zipped:
            while (found := await asyncio.to_thread(outcome, gunzip, sent, room)) is None:
                if room >= takes.most:
                    raise too_large(f"is more than {takes.most} bytes once gunzipped", takes.smaller)
                room = min(takes.most, max(room, 1) * _STEP)
                await self._book(booking, takes, room, len(sent), deadline)
            if isinstance(found, Refused):
                raise found
            body = found
            scope["headers"] = [
                pair for pair in scope["headers"] if pair[0] not in (b"content-encoding", b"content-length")
            ]
        booking.settle(takes.in_memory * len(body or b""))
        return None if body is None else _replay(body, receive)

    async def _book(self, booking: Booking, takes: Takes, room: int, sent: int, deadline: float) -> None:
        if not await booking.take(takes.in_memory * room, sent, deadline):
            detail = (
                f"bodies that wait for room have {booking.taken} bytes of memory already -> {takes.more_room}"
            )
            raise Refused(503, detail, "held bytes")

    async def _read(self, receive: Receive, takes: Takes) -> bytes | bytearray | None:
        pause_s, body_s = self._bounds.body_pause_s, self._bounds.body_s
        body: bytes | bytearray = b""
        more, until = True, time.monotonic() + body_s
        while more:
            left = until - time.monotonic()
            try:
                async with asyncio.timeout(min(pause_s, left)):
                    message = await receive()
            except TimeoutError:
                raise stalled(len(body), pause_s, body_s, whole=left < pause_s) from None
            if message["type"] == "http.disconnect":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            if body and part:
                body = body if isinstance(body, bytearray) else bytearray(body)
                body += part
            else:
                body = body or part
            if len(body) > takes.most:
                raise too_large(f"has more than {takes.most} bytes", takes.smaller)
        return body


def no_body() -> Receive:
    """Returns the `receive` of a request whose body no route takes: the connection discards the body, and the
    end of the connection is not seen behind it.
    """
    return _replay(b"", _nothing_more)


async def _nothing_more() -> Message:
    waiting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await waiting  # until the task of the request ends


def _replay(body: bytes | bytearray, receive: Receive) -> Receive:
    """Returns a `receive` that begins with a body that was read already."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    def again() -> Awaitable[Message]:
        return _message(messages.pop()) if messages else receive()

    return again


async def _message(message: Message) -> Message:
    return message


# --- memory for bodies --------------------------------------------------------------------------------------


class HeldBytes:
    """Limits the memory of all bodies together; requests for more wait.

    Args:
        most: bytes.
        in_line: first come, first served; else any request that fits is granted, also one that came later.
    """

    def __init__(self, most: int, *, in_line: bool = True) -> None:
        self._most = most
        self._turn = asyncio.Lock() if in_line else nullcontext()
        self._freed = asyncio.Event()
        self.held = 0
        self.whole = 0  # bodies that have all they asked for

    async def acquire(self, size: int, timeout_s: float) -> bool:
        """Waits for room, or until no other body holds all it asked for; False after the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._turn:
                while self.whole and self.held + size > self._most:
                    await self._freed.wait()
                self.held += size
                self.whole += 1
                return True
        return False

    def give_back(self, size: int, *, whole: bool) -> None:
        """Gives back this many bytes."""
        self.held -= size
        self.whole -= whole
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()  # all that wait look again


class Booking:
    """One body's part of HeldBytes.

    A body that waits first gives back its part, except for the bytes as sent: no two wait for each other.
    """

    def __init__(self, memory: HeldBytes) -> None:
        self._memory, self._whole = memory, False
        self.size = 0

    async def take(self, size: int, sent: int, deadline: float) -> bool:
        """Waits for `size` bytes in all, keeps only `sent` meanwhile; False after the monotonic deadline."""
        self._shrink(min(sent, self.size), whole=False)
        if not await self._memory.acquire(size - self.size, max(0.0, deadline - time.monotonic())):
            return False
        self.size, self._whole = size, True
        return True

    @property
    def taken(self) -> int:
        """Bytes that all bodies hold."""
        return self._memory.held

    def settle(self, size: int) -> None:
        """Reduces the booking to this size."""
        self._shrink(min(size, self.size), whole=self._whole)

    def release(self) -> None:
        """Gives all memory back. Idempotent."""
        self._shrink(0, whole=False)

    def _shrink(self, size: int, *, whole: bool) -> None:
        self._memory.give_back(self.size - size, whole=self._whole and not whole)
        self.size, self._whole = size, whole


class BrokenOff(Refused):
    """A gzip body that ends early or holds no valid data."""


def outcome(work: Callable[..., Result], *arguments: Any) -> Result | Refused:
    """Returns what the call returns, or its Refused without the frames that hold the body."""
    try:
        return work(*arguments)
    except Refused as wrong:
        wrong.__traceback__ = wrong.__context__ = wrong.__cause__ = None
        return wrong


def gunzip(raw: bytes | bytearray, most: int) -> bytearray | None:
    """Returns the decompressed body; None if it has more than `most` bytes, of which only one more is made.

    The time grows with the bytes in and out, whatever the number of gzip members. Raises Refused (400).
    """
    made, at, view = bytearray(), 0, memoryview(raw)
    try:
        while at < len(raw):
            member, step = zlib.decompressobj(31), _FIRST_STEP
            while not member.eof:
                given = view[at : at + step]
                if not given:
                    raise BrokenOff(400, "Invalid gzip payload: it ends too early -> post it again", "gzip")
                made += member.decompress(given, most - len(made) + 1)
                if len(made) > most:
                    return None
                at += len(given) - len(member.unused_data)
                step = min(2 * step, _LAST_STEP)
            at = _PADDING.match(raw, at).end()  # type: ignore[union-attr]
    except zlib.error as wrong:
        kind = Refused if any(word in str(wrong) for word in _REFUSED_THERE) else BrokenOff
        detail = f"Invalid gzip payload: {wrong} -> gzip it, or leave Content-Encoding out"
        raise kind(400, detail, "gzip") from None
    return made


# --- answers ------------------------------------------------------------------------------------------------

_OPENAI_TYPES = {401: "unauthorized", 500: "internal_error", 503: "unavailable"}


def json_answer(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response in JSON."""
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


def refusal_headers(refused: Refused) -> dict[str, str]:
    """Returns the headers that belong to a refusal."""
    headers = {"retry-after": "1"} if refused.status == 503 else {}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refused.status == 408:
        headers["connection"] = "close"  # what comes late is no request
    return headers


def openai_error(refused: Refused) -> Response:
    """Returns the answer to a refusal in the form of the OpenAI API."""
    kind = _OPENAI_TYPES.get(refused.status, "invalid_request_error")
    error = {"message": refused.detail, "type": kind, "code": refused.status}
    return json_answer({"error": error}, refused.status, refusal_headers(refused))


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
