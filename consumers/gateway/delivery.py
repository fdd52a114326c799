"""Connections that detect whether a response was read, for acknowledged delivery. The client is unchanged, so
the proof is TCP's. A response was read if another request arrives on its connection, or if the peer closes in
order (FIN) after everything was written and acknowledged. A peer that closes with unread bytes, or is killed,
sends a reset instead. docs/reference/gateway.md lists what this cannot see.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
from typing import Any, Protocol

from shmbridge.httpd.door import limit_unread_answer
from shmbridge.httpd.server import BoundedConnection

_SIOCOUTQ = 0x5411  # bytes of the send queue that the peer has not acknowledged
_KEEPALIVE = (
    (socket.SO_KEEPALIVE, 1, socket.SOL_SOCKET),
    (socket.TCP_KEEPIDLE, 30, socket.IPPROTO_TCP),
    (socket.TCP_KEEPINTVL, 10, socket.IPPROTO_TCP),
    (socket.TCP_KEEPCNT, 3, socket.IPPROTO_TCP),
)


class Carried(Protocol):
    """An object whose response is in delivery. One of the methods is called, once, in the event loop."""

    def read(self) -> None:
        """The response was read."""

    def unread(self) -> None:
        """The response was not read, or that is unknown."""


class ProvingConnection(BoundedConnection):
    """One connection of the gateway; request handlers find it in their scope's state."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self.carried: list[Carried] = []
        self.gone = False  # the peer no longer reads responses; readable from any thread

    @property
    def is_proving(self) -> bool:
        """Whether a response on it lacks proof."""
        return bool(self.carried)

    def carry(self, carried: Carried) -> None:
        """Registers the object to notify of the current response's delivery."""
        if self.gone:
            carried.unread()
        else:
            self.carried.append(carried)
            limit_unread_answer(self.transport.get_extra_info("socket"), 0)

    def next_request(self) -> None:
        """Reports a new request, which proves that the previous response was read."""
        if self.carried:
            limit_unread_answer(self.transport.get_extra_info("socket"), self._bounds.body_pause_s)
        self._settle(read=True)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Enables detection of peers that vanish without closing."""
        peer = transport.get_extra_info("socket")
        if peer.family in (socket.AF_INET, socket.AF_INET6):
            for option, value, level in _KEEPALIVE:
                peer.setsockopt(level, option, value)
        super().connection_made(transport)

    def eof_received(self) -> None:
        """The peer has closed its side, in order."""
        self.gone = True  # later responses are not read
        self._settle(read=self._all_delivered())
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Reports responses without proof as unread: the connection is gone."""
        self.gone = True
        self._settle(read=False)
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Keeps an idle connection while a response on it lacks proof."""
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
        """Returns whether the response is complete, written and acknowledged, without a reset."""
        if (
            self.link is None
            or self.cycle is None
            or not self.cycle.response_complete
            or self.link.get_write_buffer_size()
        ):
            return False
        peer = self.link.get_extra_info("socket")
        try:
            (unacknowledged,) = struct.unpack("i", fcntl.ioctl(peer.fileno(), _SIOCOUTQ, b"\0\0\0\0"))
            return unacknowledged <= self.link.ended and not peer.getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            )
        except OSError:
            return False
