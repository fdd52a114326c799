"""Connections that know whether an answer was read: the proof behind acknowledged delivery.

The client is not changed, so the proof is TCP's own. An answer was read when another request comes on its
connection, or when the peer closes in order (FIN) while everything was written and acknowledged: a peer that
closes with unread bytes, or is killed, sends a reset instead. docs/reference/gateway.md lists what this
cannot see. Knows uvicorn's h11 protocol and sockets; knows nothing of what is carried.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
from typing import Any, Protocol, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

_SIOCOUTQ = 0x5411  # bytes of the send queue that the peer has not acknowledged
_KEEPALIVE = (
    (socket.SO_KEEPALIVE, 1, socket.SOL_SOCKET),
    (socket.TCP_KEEPIDLE, 30, socket.IPPROTO_TCP),
    (socket.TCP_KEEPINTVL, 10, socket.IPPROTO_TCP),
    (socket.TCP_KEEPCNT, 3, socket.IPPROTO_TCP),
)


class Carried(Protocol):
    """Something whose answer is on its way over a connection; exactly one of the two is called, once, in the
    event loop.
    """

    def read(self) -> None:
        """The answer was read."""

    def unread(self) -> None:
        """The answer was not read, or nobody can tell."""


class Carrier(Protocol):
    """A connection, as those see it who answer on it."""

    gone: bool  # nobody reads any more what is answered; any thread may look

    def carry(self, carried: Carried) -> None:
        """What the answer that is being made says, is to be told of its fate."""

    def next_request(self) -> None:
        """A request has come: whatever was answered before it was read."""


class Unproven:
    """Stands in where there is no connection to look at (an ASGI test client): every answer counts as
    read.
    """

    gone = False

    def carry(self, carried: Carried) -> None:
        """Taken as read."""
        carried.read()

    def next_request(self) -> None:
        """Nothing is carried."""


def carrier_of(scope: Any) -> Carrier:
    """The connection of an ASGI scope."""
    carrier: Carrier = scope.get("state", {}).get("connection") or Unproven()
    return carrier


class ProvingConnection(H11Protocol):
    """One connection of the gateway."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self.carried: list[Carried] = []
        self.gone = False
        self._link: _Lingering | None = None

    def carry(self, carried: Carried) -> None:
        """See Carrier."""
        if self.gone:
            carried.unread()
        else:
            self.carried.append(carried)

    def next_request(self) -> None:
        """See Carrier."""
        self._settle(read=True)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A peer has come: one that vanishes without a word is to be noticed some time."""
        peer = transport.get_extra_info("socket")
        if peer.family in (socket.AF_INET, socket.AF_INET6):
            for option, value, level in _KEEPALIVE:
                peer.setsockopt(level, option, value)
        self._link = _Lingering(transport, self)
        super().connection_made(cast(asyncio.Transport, self._link))

    def data_received(self, data: bytes) -> None:
        """More of a request; after our own end of the stream nobody answers any more."""
        if self._link is None or not self._link.ended:
            super().data_received(data)

    def eof_received(self) -> None:
        """The peer has closed its side, in order."""
        self.gone = True  # what is answered from now on, nobody reads
        self._settle(read=self._all_delivered())
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more; what has no proof by now never gets one."""
        self.gone = True
        self._settle(read=False)
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection is kept while an answer on it is without proof: closing it would end the
        proof.
        """
        if not self.carried:
            super().timeout_keep_alive_handler()

    def _settle(self, *, read: bool) -> None:
        settled, self.carried = self.carried, []
        for each in settled:
            if read:
                each.read()
            else:
                each.unread()

    def _all_delivered(self) -> bool:
        """Whether the answer is complete, written, and acknowledged to the last byte, on a connection that
        was not reset.
        """
        if (
            self._link is None
            or self.cycle is None
            or not self.cycle.response_complete
            or self._link.get_write_buffer_size()
        ):
            return False
        peer = self._link.get_extra_info("socket")
        try:
            (unacknowledged,) = struct.unpack("i", fcntl.ioctl(peer.fileno(), _SIOCOUTQ, b"\0\0\0\0"))
            return unacknowledged <= self._link.ended and not peer.getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            )
        except OSError:
            return False


class _Lingering:
    """The transport, whose close() ends our side only while an answer is without proof: the peer is to close,
    and to say how.
    """

    def __init__(self, transport: asyncio.Transport, connection: ProvingConnection) -> None:
        self._transport, self._connection = transport, connection
        self.ended = False  # our own end of the stream counts as one byte of the send queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is to be written."""
        return self.ended or self._transport.is_closing()

    def close(self) -> None:
        """Closes; or, with something carried, ends our side and waits for the peer."""
        if not self._connection.carried or self._transport.is_closing():
            self._transport.close()
        elif not self.ended:
            self.ended = True
            try:
                self._transport.write_eof()
            except OSError:  # the peer has reset the connection already
                self._transport.abort()
            else:
                self._transport.resume_reading()
