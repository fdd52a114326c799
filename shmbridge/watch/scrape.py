"""An HTTP server for Prometheus: `/metrics`, and `/healthz` for probes. Its requests delay no bridge."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shmbridge.watch.prometheus import CONTENT_TYPE, Exporter

_SILENT_S = 10.0  # a client that sends nothing for so long is let go


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = _SILENT_S
    server: "ScrapeServer"

    def do_GET(self) -> None:
        """Answers; the name is the one that http.server calls."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, self.server.text(), CONTENT_TYPE)
        elif path == "/healthz":
            self._answer(200, "ok\n", "text/plain; charset=utf-8")
        else:
            self._answer(404, "/metrics or /healthz\n", "text/plain; charset=utf-8")

    def _answer(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: one line per scrape is noise."""


class ScrapeServer(ThreadingHTTPServer):
    """Answers scrapes until `shutdown`. `serve_forever` blocks; looks are made one at a time.

    Args:
        address: host and port to listen on; port 0 for any.
        exporter: for this server alone.

    Raises:
        OSError: the address is taken, or not this machine's.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], exporter: Exporter) -> None:
        super().__init__(address, _Handler)
        self._exporter, self._looking = exporter, threading.Lock()

    def text(self) -> str:
        """Returns a look as Prometheus text. Waits while another is made."""
        with self._looking:
            return self._exporter.text()
