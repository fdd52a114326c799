"""The HTTP gateway: Atropos' API over a bridge, served by uvicorn until a signal ends it.

Remote environments post into it, trainers poll batches from it; docs/reference/gateway.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator

from shmbridge.consumers.gateway.options import GatewayOptions
from shmbridge.listening import cannot_listen

log = logging.getLogger(__name__)

_BACKLOG = 2048
_FIRST_HANDED_OVER = 3
_END_S = 2  # wait for responses in progress; limits the wait for clients that keep connections open


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket: clients that connect from now on wait for the gateway instead of being
    refused.

    A socket passed by systemd (sd_listen_fds) is used as it is; its holder keeps clients waiting while a
    gateway restarts. Raises BadArgument, and OSError for a passed socket that is none.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
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


def serve(options: GatewayOptions, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGINT or SIGTERM. Blocks; main thread only. `ready` is called once the gateway serves
    requests.

    Raises:
        ConsumerTaken: in strict mode, which must be the hub, another consumer is alive.
    """
    if not options.token and not _local(listener):
        address = listener.getsockname()[0]
        log.warning(
            "anyone who can reach %s may post, poll and reset: there is no token -> set "
            "SHMBRIDGE_GATEWAY_TOKEN",
            address,
        )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options, listener, ready))


def _local(listener: socket.socket) -> bool:
    """Returns whether the address is reachable only from this machine."""
    return (
        listener.family not in (socket.AF_INET, socket.AF_INET6)
        or ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    )


async def _serve(options: GatewayOptions, listener: socket.socket, ready: Callable[[], None]) -> None:
    import uvicorn

    from shmbridge.consumers.gateway.app import make_app
    from shmbridge.consumers.gateway.delivery import ProvingConnection
    from shmbridge.consumers.gateway.modes import DefaultMode, StrictMode

    mode = StrictMode(options) if options.compat == "strict" else DefaultMode(options)

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Makes a signal end serving without raising it again: the process leaves the bridge first."""
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            mode.close_lanes()  # first responds to posts that wait for room
            await super().shutdown(sockets)

    config = uvicorn.Config(
        make_app(mode),
        http=ProvingConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_END_S,
    )
    try:
        await mode.open()
        await Server(config).serve([listener])
    finally:
        await mode.close()
