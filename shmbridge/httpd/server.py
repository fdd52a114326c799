"""uvicorn within bounds: connections that must send their heads in time, and servers that end in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shmbridge.httpd.door import LINGER_S, Bounds, Headers, Places, Refused, limit_unread_answer, listen
from shmbridge.httpd.gate import Gate, HeldBytes, Takes, openai_error

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
_REASON = 500  # characters of why a request is not HTTP
_KEEP_ALIVE_S = 75  # without a request on a connection
_END_S = 2  # wait for responses in progress; limits the wait for clients that keep connections open


class BoundedConnection(H11Protocol):
    """One connection. A head, and a body that is left after its answer, have a limited time to come; a peer
    that takes nothing of an answer for the time of a pause is let go.

    Args:
        bounds: of the server.
        places: of all its connections.
    """

    def __init__(self, *arguments: Any, bounds: Bounds, places: Places, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bounds, self._places = bounds, places
        self._refused = False
        self._awaited = ""  # what must come in time
        self._late: asyncio.TimerHandle | None = None
        self.link: Lingering | None = None

    @property
    def is_proving(self) -> bool:
        """Whether the peer's close is waited for, however long that takes."""
        return False

    @property
    def is_unread(self) -> bool:
        """Whether more of a request may come (LINGER_S says why that matters at the end)."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the connection, if there is a place."""
        self._refused = not self._places.enter(self)
        if self._refused:
            transport.write(_BUSY)
            transport.close()
            return
        self.link = Lingering(transport, self)
        super().connection_made(cast(asyncio.Transport, self.link))
        limit_unread_answer(transport.get_extra_info("socket"), self._bounds.body_pause_s)
        self._await("head")

    def data_received(self, data: bytes) -> None:
        """Receives more of a request; after our side was shut down, requests are not served."""
        if self.link is not None and not self.link.ended:
            super().data_received(data)
            self._watch()

    def handle_events(self) -> None:
        """Handles what has come."""
        try:
            super().handle_events()
        except ValueError:  # a Content-Length of more digits than Python reads
            self.send_400_response("Content-Length has too many digits -> send the body's length")

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, with the reason."""
        wrong = sys.exc_info()[1]
        if isinstance(wrong, h11.RemoteProtocolError):
            msg = f"{wrong} -> send an HTTP/1.1 request"
        super().send_400_response(msg[:_REASON].encode("ascii", "replace").decode())

    def on_response_complete(self) -> None:
        """Ends a request; the rest of a body that was not read has little time."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        self._await("")
        if not self._refused:
            self._places.leave(self)
            super().connection_lost(exc)

    def evict(self) -> None:
        """Ends a connection that has sent no whole head, at once."""
        self.transport.abort()

    def _watch(self) -> None:
        """Has the timer be that of what must come next."""
        if self.link is not None and self.link.ended:
            self._await("" if self.is_proving else "close")
            return
        state = self.conn.their_state
        if state is not h11.IDLE:
            self._places.has_head(self)
        if state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            self._await("head")
        elif state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            self._await("unread body")
        else:
            self._await("")

    def _await(self, what: str) -> None:
        if what == self._awaited:
            return
        if self._late is not None:
            self._late.cancel()
        self._awaited, self._late = what, None
        if what:
            limit_s = self._bounds.head_s if what == "head" else self._bounds.body_pause_s
            limit_s = LINGER_S if what == "close" else limit_s
            self._late = self.loop.call_later(limit_s, self._too_late)

    def _too_late(self) -> None:
        self.transport.abort()


class Lingering:
    """A transport whose close() keeps reading while the peer may send, or proves by its close what it has
    read.
    """

    def __init__(self, transport: asyncio.Transport, connection: BoundedConnection) -> None:
        self._transport, self._connection = transport, connection
        self.ended = False  # our FIN counts as one byte of the send queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Returns whether our side is closed for writing."""
        return self.ended or self._transport.is_closing()

    def close(self) -> None:
        """Closes; or shuts down our side, and waits for the peer."""
        lingers = self._connection.is_proving or self._connection.is_unread
        if not lingers or self._transport.is_closing():
            self._transport.close()
        elif not self.ended:
            self.ended = True
            try:
                self._transport.write_eof()
            except OSError:  # the peer has reset the connection already
                self._transport.abort()
            else:
                self._transport.resume_reading()


class Server(uvicorn.Server):
    """Serves an application within bounds; for one event loop.

    Args:
        app: with its gate.
        connection: makes connections, of BoundedConnection or a subclass.
        ready: called once requests are served.
        ending: called when serving ends, before responses in progress are waited for.
    """

    def __init__(
        self,
        app: ASGIApp,
        bounds: Bounds,
        connection: type[BoundedConnection] = BoundedConnection,
        *,
        ready: Callable[[], object] = lambda: None,
        ending: Callable[[], object] = lambda: None,
    ) -> None:
        self.places = Places(bounds.places, lambda each: each.evict())
        self._ready, self._ending = ready, ending
        self.signal: int | None = None  # that ended it
        http: Any = partial(connection, bounds=bounds, places=self.places)
        config = uvicorn.Config(
            app,
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_END_S,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Makes a signal end serving without raising it again: the caller leaves the bridge first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number)
        yield

    def _end(self, number: int) -> None:
        self.signal = number
        self.handle_exit(number, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to serve."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends serving."""
        self._ending()
        await super().shutdown(sockets)


class LoopServer:
    """Serves an application in the running event loop, beside what else its program does: signals are the
    program's, and so is a socket that systemd passed to it. Refusals have the form of the OpenAI API.

    For one event loop; an async context manager, or `start` and `close`, each once.

    Args:
        app: gets whole bodies, as `Gate` gives them.
        check: raises Refused if a request's headers do not permit it; called before its body is read.
        reads: whether the body of a path and method is read.
        bounds: of connections, of one body, and of all bodies together.
        host, port: where it listens; port 0: a free one.

    Attributes:
        url: where it is asked, once started.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        check: Callable[[Headers], None],
        reads: Callable[[str, str], bool],
        bounds: Bounds,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        takes = Takes(bounds.body_bytes, HeldBytes(bounds.bodies_bytes, in_line=False), bounds.room_s)
        gate = Gate(
            partial(_until_the_end, app),
            check=check,
            takes=lambda path, method: takes if reads(path, method) else None,
            refused=openai_error,
            bounds=bounds,
        )
        self._ready = asyncio.Event()
        self._server = _Beside(gate, bounds, ready=self._ready.set)
        self._host, self._port = host, port
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Begins to serve; leaves nothing where it fails or is cancelled. Raises BadArgument: the address
        cannot be bound.
        """
        self._socket = listen(self._host, self._port, handed_over=False)
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        served = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({served, self._serving}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.is_set():
                self._serving.result()
                raise OSError("the server ended before it served")
        except BaseException:
            served.cancel()
            await self.close()
            raise
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"

    async def close(self) -> None:
        """Ends serving. Waits a moment for answers in progress, then cancels them: a client gets status 503,
        or its connection is closed if its answer has begun. May be called where `start` has failed.
        """
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            if cancelled := self._server.server_state.tasks:
                await asyncio.wait(cancelled, timeout=_END_S)
        if self._socket is not None:
            self._socket.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _until_the_end(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs `app`; where the server ends first, the client is told to send the request again."""
    has_begun = False

    async def sent(message: Message) -> None:
        nonlocal has_begun
        has_begun = True
        await send(message)

    try:
        await app(scope, receive, sent)
    except asyncio.CancelledError:
        if not has_begun:
            raise Refused(503, "the server ends -> send it again", "ending") from None
        # else uvicorn closes the connection: the answer is not whole


class _Beside(Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the program."""
        yield
