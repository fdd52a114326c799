"""An HTTP server for Prometheus: `/metrics`, and `/healthz` for probes. Its requests delay no bridge."""

import socket
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shmbridge.watch.prometheus import CONTENT_TYPE, Exporter

_SILENT_S = 5.0  # a client that sends or takes nothing for so long is let go
_MOST = 64  # clients at once
_TEXT = "text/plain; charset=utf-8"
_FULL = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 5\r\n\r\n"


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = _SILENT_S
    server: "ScrapeServer"
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = _TEXT

    def do_GET(self) -> None:
        """Answers; the name is the one that http.server calls."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path == "/healthz":
            self._answer(HTTPStatus.OK, "ok\n", _TEXT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "/metrics or /healthz\n", _TEXT)

    do_HEAD = do_GET

    def _metrics(self) -> None:
        try:
            text = self.server.text()
        except Exception as wrong:  # the next scrape may succeed; this one says why it did not
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(wrong).__name__}: {wrong}\n", _TEXT)
        else:
            self._answer(HTTPStatus.OK, text, CONTENT_TYPE)

    def _answer(self, status: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: one line per scrape is noise."""


class ScrapeServer(ThreadingHTTPServer):
    """Answers scrapes until `shutdown`. `serve_forever` blocks; looks are made one at a time.

    Clients beyond `_MOST` at once get a 503; a silent one is let go after `_SILENT_S` seconds.

    Args:
        address: host and port to listen on; port 0 for any. The host may be of IPv4 or IPv6, or a name.
        exporter: for this server alone.

    Raises:
        OSError: the address is taken, or not this machine's.
    """

    daemon_threads = True
    request_queue_size = 2 * _MOST

    def __init__(self, address: tuple[str, int], exporter: Exporter) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, there = found[0]
        super().__init__((str(there[0]), int(there[1])), _Handler)
        self._exporter, self._looking = exporter, threading.Lock()
        self._room = threading.Semaphore(_MOST)

    @property
    def url(self) -> str:
        """Where it answers."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/metrics"

    def text(self) -> str:
        """Returns a look as Prometheus text. Waits while another is made."""
        with self._looking:
            return self._exporter.text()

    def server_bind(self) -> None:
        """Binds; does not ask a name server for its own name, as HTTPServer does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own; refuses where there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
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
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says what went wrong in one line; that a client has gone is no news."""
        wrong = sys.exc_info()[1]
        if not isinstance(wrong, (ConnectionError, TimeoutError)):
            print(f"scrape of {client_address[0]}: {type(wrong).__name__}: {wrong}", file=sys.stderr)
