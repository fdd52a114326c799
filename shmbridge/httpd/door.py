"""What a request must pass before its body is read, in every HTTP server here, and where servers listen.

Imports the standard library alone: `producers/skyrl_gym/env_server.py` loads this file and `threads.py` in
Python environments that have nothing of shmbridge.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import resource
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmbridge.errors import BadArgument

# The value of a header by its name in lower case: "" if there is none, joined by commas if there are several.
Headers = Callable[[str], str]

_LENGTH = re.compile(r"[0-9]{1,18}")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[0-9]{0,5})?")
_FORMS = ("text/plain", "multipart/form-data")  # not what curl and urllib call a body that has no type
# a peer is read on for so long before its connection is closed: who closes with unread bytes resets the
# connection, answer and all
LINGER_S = 2.0
_FIRST_HANDED_OVER = 3
_REASON = 2000  # characters of a refusal's reason: it may name what the peer has sent
_BACKLOG = 2048


class Refused(Exception):
    """A request that is refused: an HTTP status, the reason in one line, and a kind that is counted.

    A very long reason is cut in its middle.
    """

    def __init__(self, status: int, detail: str, kind: str) -> None:
        if len(detail) > _REASON:
            detail = f"{detail[: _REASON // 2]}...{detail[-_REASON // 2 :]}"
        super().__init__(detail)
        self.status, self.detail, self.kind = status, detail, kind


class BadRequest(Refused):
    """A request that is wrong in itself: status 400."""

    def __init__(self, detail: str, kind: str = "malformed") -> None:
        super().__init__(400, detail, kind)


@dataclass(frozen=True)
class Bounds:
    """How much one server takes at most, and how long it waits for it."""

    connections: int = 1024  # at once, and three quarters of the descriptors that the process may have
    head_s: float = 10.0  # for a whole head, from the beginning of the connection or of the head
    body_bytes: int = 1 << 20  # of one body
    bodies_bytes: int = 64 << 20  # of memory for all bodies together; one larger body waits until it is alone
    room_s: float = 10.0  # for room among them
    body_pause_s: float = 30.0  # without a byte within a body
    body_s: float = 300.0  # for a whole body

    @property
    def places(self) -> int:
        """Connections at once, as the process' limits allow."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.connections if soft < 0 else max(1, min(self.connections, soft * 3 // 4))


class Site:
    """Keeps pages of other sites out, which a browser on this machine may show. For servers without a secret.

    Args:
        names: host names with a dot that are this server's, besides the machine's own.
        hint: how to let another in, with `{name}` for the refused one's name.
        forms: whether bodies of the types are taken that a page may send anywhere without asking.
    """

    def __init__(
        self, names: Collection[str] = (), hint: str = "--host-name {name}", *, forms: bool = True
    ) -> None:
        self._names = {name.lower() for name in (socket.gethostname(), *names)}
        self._hint, self._forms = hint, forms

    def check(self, header: Headers) -> None:
        """Raises Refused: 403 for another site's page or name, 415 for a form's type. Never blocks."""
        if header("sec-fetch-site") not in ("", "none", "same-origin"):
            raise Refused(
                403, f"pages of other sites may not ask -> {self._hint.format(name='NAME')}", "browser"
            )
        host, origin = header("host").lower(), header("origin").lower()
        found = _HOST.fullmatch(host)
        name = found[1] if found else "NAME"
        if origin and (not host or origin.partition("://")[2] != host):
            raise Refused(
                403, f"Origin {origin!r} is not this server -> {self._hint.format(name=name)}", "browser"
            )
        if host and not (found and self._is_ours(name)):
            raise Refused(
                403, f"Host {host!r} is not a name of this server -> {self._hint.format(name=name)}", "host"
            )
        if not self._forms and (kind := header("content-type").partition(";")[0].strip().lower()) in _FORMS:
            raise Refused(
                415, f"the body came as {kind} -> send it with Content-Type: application/json", "form"
            )

    def _is_ours(self, host: str) -> bool:
        """Returns whether no other site can have this host: an address, a local name, or a known name."""
        name = host.rstrip(".")
        if name[:1] != "[" and ("." not in name.removesuffix(".localhost") or name in self._names):
            return True
        try:
            return bool(ipaddress.ip_address(name.strip("[]")))
        except ValueError:
            return False


def content_length(given: Sequence[str], most: int, hint: str = "send less at once") -> int:
    """Returns the length of a body by its Content-Length headers: 0 without one.

    Raises Refused: 400 unless they are one number, 413 above `most` bytes.
    """
    if not given:
        return 0
    text = given[0].strip()
    if len(set(given)) > 1 or not _LENGTH.fullmatch(text):
        raise BadRequest(
            f"Content-Length: {', '.join(given)[:40]} is not a number of bytes -> send the body's length"
        )
    if int(text) > most:
        raise too_large(f"has {int(text)} bytes, at most {most} are taken", hint)
    return int(text)


def too_large(what: str, hint: str) -> Refused:
    """Returns the refusal of a body that is too large."""
    return Refused(413, f"the body {what} -> {hint}", "too large")


def stalled(size: int, pause_s: float, body_s: float, *, whole: bool) -> Refused:
    """Returns the refusal of a body that takes too long, after `size` bytes: as a `whole`, or for a pause."""
    what = (
        f"the body was not whole after {body_s:g} s"
        if whole
        else f"the body brought nothing for {pause_s:g} s"
    )
    return Refused(408, f"{what}, {size} bytes have come -> send it again", "stalled")


def json_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object that a body is. Raises BadRequest, also for brackets or digits without end."""
    try:
        value = json.loads(body)
    except RecursionError:
        raise BadRequest("the body has brackets within brackets without end -> send plain JSON") from None
    except ValueError as wrong:  # JSON and UTF-8, and numbers of thousands of digits
        raise BadRequest(
            f"the body is not JSON: {str(wrong).partition(';')[0]} -> send a JSON object"
        ) from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body is a JSON {type(value).__name__} -> send a JSON object")
    return value


class Places:
    """The connections of one server, `most` at once; any thread.

    A new one that finds no place takes that of the oldest that has not sent a whole head yet: half-sent heads
    keep nobody out.

    Args:
        most: connections.
        evict: ends a connection that has lost its place; any thread.
    """

    def __init__(self, most: int, evict: Callable[[Any], None]) -> None:
        self._most, self._evict, self._lock = most, evict, threading.Lock()
        self._all: set[Any] = set()
        self._without_head: dict[Any, None] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, connection: Any) -> bool:
        """Returns whether there was a place. Never blocks."""
        oldest = None
        with self._lock:
            if len(self._all) >= self._most:
                if not self._without_head:
                    return False
                oldest = next(iter(self._without_head))
                del self._without_head[oldest]
                self._all.discard(oldest)
            self._all.add(connection)
            self._without_head[connection] = None
        if oldest is not None:
            self._evict(oldest)
        return True

    def has_head(self, connection: Any) -> None:
        """Notes that a whole head has come: the connection keeps its place until it leaves. Never blocks."""
        with self._lock:
            self._without_head.pop(connection, None)

    def leave(self, connection: Any) -> None:
        """Gives the place back. Idempotent."""
        with self._lock:
            self._without_head.pop(connection, None)
            self._all.discard(connection)


def limit_unread_answer(peer: socket.socket, limit_s: float) -> None:
    """Has the kernel end the connection of a peer that takes nothing of an answer for this long; 0: never."""
    if peer.family in (socket.AF_INET, socket.AF_INET6):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


def listen(host: str, port: int, *, handed_over: bool = True) -> socket.socket:
    """Returns a listening socket: clients that connect from now on wait for the server instead of being
    refused.

    A socket passed by systemd (sd_listen_fds) is used as it is; its holder keeps clients waiting while a
    server restarts; with `handed_over=False` it is left to whom it is meant for. Raises BadArgument, and
    OSError for a passed socket that is none.
    """
    is_ours = os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1"
    if handed_over and is_ours:
        try:
            return socket.socket(fileno=_FIRST_HANDED_OVER)
        except OSError as wrong:
            problem = (
                f"LISTEN_FDS says that descriptor {_FIRST_HANDED_OVER} is a listening socket: "
                f"{os.strerror(wrong.errno or 0)}"
            )
            raise OSError(f"{problem} -> unset LISTEN_FDS, or hand over the socket") from wrong
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        both = family == socket.AF_INET6  # "::" takes IPv4 too
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as wrong:
        raise cannot_listen(host, port, wrong) from wrong


def cannot_listen(host: str, port: int, error: OSError | UnicodeError, flag: str = "--port") -> BadArgument:
    """Returns the error for an address that could not be bound.

    Args:
        host, port: as they were given.
        error: what binding raised.
        flag: the one that gives the port.
    """
    from shmbridge.errors import BadArgument

    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(error, socket.gaierror | UnicodeError):
        return BadArgument(
            f"host {host!r} has no address", hint="127.0.0.1 for this machine alone, 0.0.0.0 for all networks"
        )
    if error.errno == errno.EADDRINUSE:
        hint = f"another {flag}, or find who has it: ss -ltnp 'sport = :{port}'"
        return BadArgument(f"cannot listen on {where}: the port is in use", hint=hint)
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "127.0.0.1 for this machine alone, 0.0.0.0 for all networks"
        return BadArgument(f"cannot listen on {where}: {host} is no address of this machine", hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return BadArgument(
            f"cannot listen on {where}: uid {os.geteuid()} may not", hint=f"a {flag} of 1024 or above"
        )
    return BadArgument(f"cannot listen on {where}: {error.strerror or error}", hint=f"another {flag}")
