"""The options of a gateway, who may ask it, and how large bodies its routes take."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shmbridge.httpd.door import Bounds, Headers, Refused, Site
from shmbridge.httpd.gate import Gate, HeldBytes, Takes, json_answer, refusal_headers
from shmbridge.hub import Policy
from shmbridge.schema import Split

Compat = Literal["default", "strict"]
_BOUNDS = Bounds(connections=4096)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How one gateway behaves."""

    bridge: str
    # "strict" has the Atropos server's numbers and order; "default" mends what loses data there
    compat: Compat = "default"
    policy: Policy = "fair"  # how batches are formed in default mode; as Consumer's
    split: Split | None = "train"  # groups that /batch serves; None: all
    lane_bytes: int | str = "64M"  # of each remote environment's lane, reserved when it registers
    lanes: int = 256  # most lanes taken from at once
    token: str = ""  # bearer token that every request must have; empty: none
    host_names: tuple[str, ...] = ()  # names with a dot, besides the machine's own; checked without a token
    max_body_bytes: int = 256 << 20  # of one request, after gunzip
    held_bytes: int = 512 << 20  # memory of all posts that wait for room; further posts wait unread
    post_deadline_s: float = 240.0  # longest wait of a post, then 503; Atropos' environments wait 300 s
    # silence after which an environment loses weight and lane until its next request; after 60 times that,
    # its number
    env_timeout_s: float = 60.0
    bounds: Bounds = _BOUNDS  # of connections, heads and other bodies
    record: str | None = None  # folder that every record is written to before a trainer gets it


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


class Front:
    """Middleware before the gateway's routes: the gate, and what it does not know.

    A new request on a connection proves that the previous response was read.

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
        self._routes = routes
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
        self._gate = Gate(app, check=self._check, takes=self._takes, refused=refusals.answer, bounds=bounds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            scope["state"]["connection"].next_request()
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
