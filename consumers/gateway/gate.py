"""ASGI middleware before the routes: authorisation, size limits, memory for bodies, gunzip."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from fastapi.responses import PlainTextResponse, Response

from shmbridge.consumers.gateway import decode
from shmbridge.consumers.gateway.decode import BrokenOff, HttpError
from shmbridge.consumers.gateway.options import GatewayOptions
from shmbridge.consumers.gateway.posts import GZIPPED, IN_MEMORY, Booking, HeldBytes

POSTS = ("/scored_data", "/scored_data_list")
OTHER_BODY_BYTES = 1 << 20  # of a request that is no post of groups
_OTHER_BODIES_BYTES = 64 << 20  # of memory, of all of them at one time
_OTHER_DEADLINE_S = 10.0  # for room in it
_STEP = 4  # times as much room is asked for when a gunzipped body turns out larger
_RETRY_S = "1"
_SMALLER = "post fewer groups at once, or start the gateway with more --max-body"


def json_answer(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response in JSON."""
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


class Refusals:
    """Counts of refused requests, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def answer(self, refused: HttpError) -> Response:
        """Returns the response to a refused request."""
        self.counts[refused.kind] += 1
        headers = {"retry-after": _RETRY_S} if refused.status == 503 else {}
        if refused.status == 401:
            headers["www-authenticate"] = "Bearer"
        if refused.status == 408:
            headers["connection"] = "close"  # what comes late is no request
        return json_answer({"detail": refused.detail}, refused.status, headers)

    def answer_as_upstream(self, refused: HttpError) -> Response:
        """Does the same, but answers an invalid gzip body as the original does."""
        if refused.kind != "gzip":
            return self.answer(refused)
        self.counts[refused.kind] += 1
        if isinstance(refused, BrokenOff):
            return PlainTextResponse("Internal Server Error", 500)
        return PlainTextResponse("Invalid gzip payload", 400)


class Gate:
    """Rejects unauthorised and oversized requests; gives routes the whole body, gunzipped.

    A new request on a connection proves that the previous response was read. A body is read only if there is
    room for it and a route takes it.

    Args:
        takes: whether a route has this path and method.
    """

    def __init__(
        self,
        app: Any,
        options: GatewayOptions,
        refusals: Refusals,
        held: HeldBytes,
        takes: Callable[[str, str], bool] = lambda path, method: True,
    ) -> None:
        self._app, self._options, self._refusals, self._held, self._takes = (
            app,
            options,
            refusals,
            held,
            takes,
        )
        self._others = HeldBytes(_OTHER_BODIES_BYTES, in_line=False)
        self._token = f"Bearer {options.token}".encode() if options.token else b""
        self._strict = options.compat == "strict"
        self._names = {name.lower() for name in (socket.gethostname(), *options.host_names)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["state"]["connection"].next_request()
        headers = dict(scope["headers"])
        if (
            self._strict
            and scope["method"] == "OPTIONS"
            and b"origin" in headers
            and b"access-control-request-method" in headers
        ):
            await self._app(scope, _nothing, send)  # a browser's CORS preflight request
            return
        is_post = scope["path"] in POSTS
        booking = Booking(self._held if is_post else self._others)
        scope["arrived_s"] = time.monotonic()
        try:
            if not self._token:
                self._check_site(headers)
            elif not hmac.compare_digest(headers.get(b"authorization", b""), self._token):
                raise HttpError(
                    401, "this gateway wants a bearer token -> send Authorization: Bearer TOKEN", "token"
                )
            if not self._takes(scope["path"], scope["method"]):
                await self._app(scope, _nothing, send)
                return
            body = await self._body(scope, headers, receive, booking, is_post)
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        except HttpError as refused:
            answer = self._refusals.answer_as_upstream if self._strict else self._refusals.answer
            await answer(refused)(scope, receive, send)
        finally:
            booking.release()

    def _check_site(self, headers: dict[bytes, bytes]) -> None:
        """Without a token, refuses requests of other sites' pages, and names that are not this gateway's."""
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise HttpError(
                403, "pages of other sites may not ask -> set a token, and let the page bear it", "browser"
            )
        host = headers.get(b"host", b"").decode("latin-1").lower()
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and origin.partition("://")[2] != host:
            raise HttpError(
                403,
                f"Origin {origin!r} is not this gateway -> set a token, and let the page bear it",
                "browser",
            )
        if host and not self._is_ours(host):
            said = (
                f"Host {host!r} is no name of this gateway -> shmbridge gateway --host-name "
                f"{host.partition(':')[0]}, or a token"
            )
            raise HttpError(403, said, "host")

    def _is_ours(self, host: str) -> bool:
        """Returns whether no other site can have this host: an address, a local name, or a known name."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            return (
                "." not in name.removesuffix(".localhost")
                or name in self._names
                or bool(ipaddress.ip_address(name))
            )
        except ValueError:
            return False

    async def _body(
        self, scope: Any, headers: dict[bytes, bytes], receive: Any, booking: Booking, is_post: bool
    ) -> bytes | bytearray | None:
        """Returns the gunzipped body; None if the peer has disconnected."""
        options = self._options
        most = options.max_body_bytes if is_post else min(options.max_body_bytes, OTHER_BODY_BYTES)
        deadline = time.monotonic() + (options.post_deadline_s if is_post else _OTHER_DEADLINE_S)
        length = headers.get(b"content-length", b"0")
        announced = int(length) if length.isdigit() else 0
        if b"transfer-encoding" in headers:
            announced = most  # the body may grow to the limit, which is unknown in advance
        if announced > most:
            raise HttpError(
                413, f"the body has {announced} bytes, at most {most} are taken -> {_SMALLER}", "too large"
            )
        zipped = b"gzip" in headers.get(b"content-encoding", b"").lower()
        room = min(most, announced * (GZIPPED if zipped else 1))
        if room:
            await self._book(booking, room, 0, deadline)
        body: bytes | bytearray | None
        body = sent = await self._read(receive, most)
        if sent and zipped:
            while (found := await asyncio.to_thread(decode.outcome, decode.gunzip, sent, room)) is None:
                if room >= most:
                    raise HttpError(
                        413, f"the body is more than {most} bytes once gunzipped -> {_SMALLER}", "too large"
                    )
                room = min(most, max(room, 1) * _STEP)
                await self._book(booking, room, len(sent), deadline)
            if isinstance(found, HttpError):
                raise found
            body = found
            scope["headers"] = [
                pair for pair in scope["headers"] if pair[0] not in (b"content-encoding", b"content-length")
            ]
        booking.settle(IN_MEMORY * len(body or b""))
        return body

    async def _book(self, booking: Booking, room: int, sent: int, deadline: float) -> None:
        if not await booking.take(IN_MEMORY * room, sent, deadline):
            raise HttpError(
                503,
                f"bodies that wait for room have {booking.taken} bytes of memory already -> "
                "post again later, or start the gateway with more --held-bytes",
                "held bytes",
            )

    async def _read(self, receive: Any, most: int) -> bytes | None:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            try:
                async with asyncio.timeout(self._options.body_pause_s):
                    message = await receive()
            except TimeoutError:
                said = (
                    f"nothing more of the body has come for {self._options.body_pause_s:g} s, after {size} "
                    "bytes -> post it again"
                )
                raise HttpError(408, said, "stalled") from None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > most:
                raise HttpError(413, f"the body is more than {most} bytes -> {_SMALLER}", "too large")
        return parts[0] if len(parts) == 1 else b"".join(parts)


async def _nothing() -> Any:
    """Is the `receive` of a request whose body no route takes; the connection discards the body."""
    return {"type": "http.request", "body": b"", "more_body": False}


def _replay(body: bytes | bytearray, receive: Any) -> Callable[[], Awaitable[Any]]:
    """Returns a `receive` that begins with a body that was read already."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again
