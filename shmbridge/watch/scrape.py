"""An HTTP server for Prometheus: `/metrics`, and `/healthz` for probes. Its requests delay no bridge."""

import threading
from collections.abc import Sequence
from http import HTTPStatus

from shmbridge.httpd.door import Bounds, Site
from shmbridge.httpd.threads import Handler, ThreadServer
from shmbridge.watch.prometheus import CONTENT_TYPE, Exporter

_BOUNDS = Bounds(connections=64, head_s=5.0, body_bytes=0, body_pause_s=5.0)
_TEXT = "text/plain; charset=utf-8"


class _Handler(Handler):
    """One request."""

    server: "ScrapeServer"

    def do_GET(self) -> None:
        """Answers; the name is the one that http.server calls."""
        self.server.site.check(self.header)
        with self.received():  # refuses a body
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._metrics()
            elif path == "/healthz":
                self.answer(HTTPStatus.OK, b"ok\n", _TEXT)
            else:
                self.answer(HTTPStatus.NOT_FOUND, b"/metrics or /healthz\n", _TEXT)

    do_HEAD = do_GET

    def _metrics(self) -> None:
        try:
            text = self.server.text()
        except Exception as wrong:  # the next scrape may succeed; this one says why it did not
            said = f"{type(wrong).__name__}: {wrong}\n".encode()
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, said, _TEXT)
        else:
            self.answer(HTTPStatus.OK, text.encode(), CONTENT_TYPE)


class ScrapeServer(ThreadServer):
    """Answers scrapes until `shutdown`. `serve_forever` blocks; looks are made one at a time.

    Args:
        address: host and port to listen on; port 0 for any. The host may be of IPv4 or IPv6, or a name.
        exporter: for this server alone.
        host_names: names with a dot under which clients reach it, besides the machine's own.
        bounds: of its clients.

    Raises:
        OSError: the address is taken, or not this machine's.
    """

    def __init__(
        self,
        address: tuple[str, int],
        exporter: Exporter,
        host_names: Sequence[str] = (),
        bounds: Bounds = _BOUNDS,
    ) -> None:
        super().__init__(address, _Handler, bounds)
        self.site = Site((address[0], *host_names), "shmbridge inspect --listen ... --host-name {name}")
        self._exporter, self._looking = exporter, threading.Lock()

    def text(self) -> str:
        """Returns a look as Prometheus text. Waits while another is made."""
        with self._looking:
            return self._exporter.text()
