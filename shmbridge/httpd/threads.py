"""An HTTP server of threads on the standard library, within bounds: `ThreadServer` and its `Handler`.

Imports the standard library and `door` alone, as that does.
"""

from __future__ import annotations

import io
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shmbridge.httpd.door import (
    LINGER_S,
    Bounds,
    Places,
    Refused,
    content_length,
    limit_unread_answer,
    stalled,
)

_FULL = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
_HEAD_BYTES = 72 << 10  # of a whole head; of one line http.server takes 64 KiB


class Room:
    """Memory for all bodies of a server of threads; any thread.

    Args:
        most: bytes.
        wait_s: longest wait for room.
    """

    def __init__(self, most: int, wait_s: float) -> None:
        self._most, self._wait_s = most, wait_s
        self._changed = threading.Condition()
        self.held = 0

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Holds `size` bytes for the block; waits for them. Raises Refused (503) if they do not come free."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self.held or self.held + size <= self._most, self._wait_s
            ):
                raise Refused(
                    503,
                    f"other bodies hold {self.held} of {self._most} bytes -> send it again later",
                    "held bytes",
                )
            self.held += size
        try:
            yield
        finally:
            with self._changed:
                self.held -= size
                self._changed.notify_all()


class _Reading(io.RawIOBase):
    """The bytes of one connection, each read within the time and size of the part that it belongs to."""

    def __init__(self, connection: socket.socket, bounds: Bounds) -> None:
        self._connection, self._bounds = connection, bounds
        self._until = time.monotonic() + bounds.head_s
        self._pause_s = bounds.head_s
        self._left: int | None = _HEAD_BYTES
        self._idle = False
        self.is_late = False  # and nothing more is read
        self.came = 0  # bytes since the last head or body began

    def readable(self) -> bool:
        return True

    def begin_head(self, *, first: bool) -> None:
        """From here on a head is read; the time of a later one begins with its first byte."""
        self._left, self.came, self._idle = _HEAD_BYTES, 0, not first

    def begin_body(self) -> None:
        """From here on a body is read."""
        self._left, self.came, self._idle = None, 0, False
        self._until, self._pause_s = time.monotonic() + self._bounds.body_s, self._bounds.body_pause_s

    def readinto(self, buffer: Any) -> int:
        if self._left is not None and self._left <= 0:
            raise Refused(431, f"the head has more than {_HEAD_BYTES} bytes -> send fewer headers", "head")
        left = None if self._idle else min(self._pause_s, self._until - time.monotonic())
        self.is_late = left is not None and left <= 0
        if self.is_late:
            raise TimeoutError("the part is not whole in time")
        self._connection.settimeout(left)
        try:
            size = self._connection.recv_into(buffer)
        except TimeoutError:
            self.is_late = True
            raise
        if self._idle:
            self._idle, self._pause_s = False, self._bounds.head_s
            self._until = time.monotonic() + self._bounds.head_s
        if self._left is not None:
            self._left -= size
        self.came += size
        return size


class Handler(BaseHTTPRequestHandler):
    """One connection of a ThreadServer: heads and bodies within its bounds. Subclasses have `do_` methods.

    A `do_` method raises Refused for what it does not take, before it reads `received()`.
    """

    server: ThreadServer
    error_content_type = "text/plain; charset=utf-8"

    def setup(self) -> None:
        """Begins a connection."""
        super().setup()
        limit_unread_answer(self.connection, self.server.bounds.body_pause_s)
        self._reading = _Reading(self.connection, self.server.bounds)
        self.rfile = io.BufferedReader(self._reading)
        self._requests, self._unread = 0, False

    def handle_one_request(self) -> None:
        """One request; a peer that is too slow with its head is let go."""
        self._reading.begin_head(first=not self._requests)
        self._requests, self._unread = self._requests + 1, True
        self.request_version = self.requestline = self.command = ""
        try:
            super().handle_one_request()
        except Refused as refused:
            self.close_connection = True
            self.refuse(refused)

    def parse_request(self) -> bool:
        """Reads the rest of the head; from then on the connection has its place."""
        parsed = super().parse_request()
        self._unread = not parsed or any(
            name in self.headers for name in ("Content-Length", "Transfer-Encoding")
        )
        self.server.places.has_head(self.connection)
        return parsed

    def handle_expect_100(self) -> bool:
        """Answers nothing yet: the body is asked for once it is wanted."""
        return True

    def header(self, name: str) -> str:
        """Returns a header; "" if there is none."""
        return ", ".join(map(str, self.headers.get_all(name, [])))

    @contextmanager
    def received(self, most: int | None = None) -> Iterator[bytes]:
        """The body, whose memory is held until the block ends. Blocks until it is whole.

        Raises Refused: its length or type cannot be taken, there is no room, or it takes too long.
        """
        bounds = self.server.bounds
        if self.header("Transfer-Encoding"):
            raise Refused(411, "the body came without its length -> send Content-Length", "length")
        size = content_length(
            self.headers.get_all("Content-Length", []), bounds.body_bytes if most is None else most
        )
        with self.server.room.of(size):
            if self.header("Expect").lower() == "100-continue":
                self.send_response_only(100)
                self.end_headers()
            self._reading.begin_body()
            began = time.monotonic()
            try:
                body = self.rfile.read(size)
            except TimeoutError:
                whole = time.monotonic() - began >= bounds.body_s
                came, pause_s, body_s = self._reading.came, bounds.body_pause_s, bounds.body_s
                raise stalled(came, pause_s, body_s, whole=whole) from None
            if len(body) < size:
                raise ConnectionAbortedError("the peer has closed within a body")
            self._unread = False
            yield body

    def refuse(self, refused: Refused) -> None:
        """Answers a refused request with its reason, and closes the connection."""
        self.answer(refused.status, f"{refused.detail}\n".encode(), self.error_content_type, refused)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what http.server itself refuses as any other refusal."""
        said, hint = message or "this is not HTTP", "send an HTTP/1.1 request"
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, said = HTTPStatus.METHOD_NOT_ALLOWED, f"{self.command} is not taken here"
            hint = "send " + " or ".join(name[3:] for name in dir(self) if name.startswith("do_"))
        self.close_connection = True
        self.refuse(Refused(code, f"{said} -> {hint}", "malformed"))

    def answer(self, status: int, body: bytes, kind: str, refused: Refused | None = None) -> None:
        """Sends a response. Blocks while the peer does not take it, up to the bounds' pause."""
        if self.request_version in ("", "HTTP/0.9"):
            self.request_version = "HTTP/1.0"
        self.connection.settimeout(self.server.bounds.body_pause_s)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if refused is not None:
            self.send_header("Connection", "close")
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def finish(self) -> None:
        """Ends the connection; first reads on for a while if a body was left unread."""
        if self._unread and not self._reading.is_late:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                self.connection.settimeout(LINGER_S)
                until = time.monotonic() + LINGER_S
                while time.monotonic() < until and self.connection.recv(1 << 16):
                    pass
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Logs no requests: a line for each is noise."""


class ThreadServer(ThreadingHTTPServer):
    """Answers within its bounds until `shutdown`, a thread for each connection. `serve_forever` blocks.

    Args:
        address: host and port to listen on; port 0 for any. The host may be of IPv4 or IPv6, or a name.
        handler: of its connections.
        bounds: of all of them.

    Raises:
        OSError: the address is taken, or not this machine's.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], handler: type[Handler], bounds: Bounds) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, there = found[0]
        self.bounds, self.room = bounds, Room(bounds.bodies_bytes, bounds.room_s)
        self.places = Places(bounds.places, _end)
        super().__init__((str(there[0]), int(there[1])), handler)

    @property
    def url(self) -> str:
        """Where it answers."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}"

    def server_bind(self) -> None:
        """Binds; does not ask a name server for its own name, as HTTPServer does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own; refuses where there are too many."""
        if self.places.enter(request):
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread could be started
                self.places.leave(request)
                raise
            return
        try:
            request.send(_FULL, socket.MSG_DONTWAIT)
        finally:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says what went wrong in one line; a client that has left is not logged."""
        wrong = sys.exc_info()[1]
        if not isinstance(wrong, (ConnectionError, TimeoutError)):
            print(f"request of {client_address[0]}: {type(wrong).__name__}: {wrong}", file=sys.stderr)


def _end(connection: socket.socket) -> None:
    """Ends the reading of a connection, whose thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
