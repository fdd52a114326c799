"""The HTTP gateway: Atropos' API over a bridge, served by uvicorn until a signal ends it.

Remote environments post into it, trainers poll batches from it; docs/reference/gateway.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable

from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.httpd.door import listen as listen

log = logging.getLogger(__name__)


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
    from shmbridge.consumers.gateway.app import make_app
    from shmbridge.consumers.gateway.gateway import Gateway
    from shmbridge.consumers.gateway.posts import ProvingConnection
    from shmbridge.httpd.server import Server

    gateway: Gateway
    if options.compat == "strict":
        from shmbridge.consumers.gateway.strict import StrictGateway, make_strict_app

        strict = StrictGateway(options)
        gateway, app = strict, make_strict_app(strict)
    else:
        gateway = Gateway(options)
        app = make_app(gateway)
    try:
        await gateway.open()
        # posts that wait for room are answered first when serving ends
        server = Server(app, options.bounds, ProvingConnection, ready=ready, ending=gateway.end)
        await server.serve([listener])
    finally:
        await gateway.close()
