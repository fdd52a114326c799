"""Who may ask the gateway, how large bodies its routes take, and its answers to what it refuses."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Collection, Mapping

from fastapi.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shmbridge.consumers.gateway.options import GatewayOptions
from shmbridge.httpd.door import Headers, Refused, Site
from shmbridge.httpd.gate import BrokenOff, Gate, HeldBytes, Takes, json_answer, no_body, refusal_headers

POSTS = ("/scored_data", "/scored_data_list")
# bytes of Python lists and numbers for a byte of their JSON, about: 1.2 GB of 96 MB, groups of 8 x 2048 with
# five columns
IN_MEMORY = 12
_SMALLER = "post fewer groups at once, or start the gateway with more --max-body"
_MORE_ROOM = "post again later, or start the gateway with more --held-bytes"


class Refusals:
    """Counts of refused requests, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def answer(self, refused: Refused) -> Response:
        """Returns the response to a refused request."""
        self.counts[refused.kind] += 1
        return json_answer({"detail": refused.detail}, refused.status, refusal_headers(refused))

    def answer_as_upstream(self, refused: Refused) -> Response:
        """Does the same, but answers an invalid gzip body as the original does."""
        if refused.kind != "gzip":
            return self.answer(refused)
        self.counts[refused.kind] += 1
        if isinstance(refused, BrokenOff):
            return PlainTextResponse("Internal Server Error", 500)
        return PlainTextResponse("Invalid gzip payload", 400)


class Front:
    """Middleware before the gateway's routes: the gate, and what it does not know.

    A new request on a connection proves that the previous response was read. In strict mode, a
    browser's preflight request (CORS) passes without the token: browsers send none with it.

    Args:
        routes: the methods of each path; filled later.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: GatewayOptions,
        refusals: Refusals,
        held: HeldBytes,
        routes: Mapping[str, Collection[str]],
    ) -> None:
        self._app, self._strict, self._routes = app, options.compat == "strict", routes
        self._token = f"Bearer {options.token}" if options.token else ""
        self._site = Site(options.host_names, "shmbridge gateway --host-name {name}, or a token")
        bounds, most = options.bounds, options.max_body_bytes
        self._posts = Takes(most, held, options.post_deadline_s, IN_MEMORY, _SMALLER, _MORE_ROOM)
        self._others = Takes(
            min(most, bounds.body_bytes),
            HeldBytes(bounds.bodies_bytes, in_line=False),
            bounds.room_s,
            IN_MEMORY,
        )
        answer = refusals.answer_as_upstream if self._strict else refusals.answer
        self._gate = Gate(app, check=self._check, takes=self._takes, refused=answer, bounds=bounds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            scope["state"]["connection"].next_request()
            names = [name for name, _ in scope["headers"]]
            asks = b"origin" in names and b"access-control-request-method" in names
            if self._strict and scope["method"] == "OPTIONS" and asks:
                await self._app(scope, no_body(), send)
                return
        await self._gate(scope, receive, send)

    def _check(self, header: Headers) -> None:
        if not self._token:
            self._site.check(header)
        elif not hmac.compare_digest(header("authorization").encode(), self._token.encode()):
            raise Refused(
                401, "this gateway wants a bearer token -> send Authorization: Bearer TOKEN", "token"
            )

    def _takes(self, path: str, method: str) -> Takes | None:
        if method not in self._routes.get(path, ()):
            return None
        return self._posts if path in POSTS else self._others
