"""Starts one of the HTTP servers with short limits, for `test_http_doors.py`.

    python http_servers.py KIND BRIDGE FOLDER

KIND: gateway, strict, policy, environments, scrapes, verifiers. Prints the port. FOLDER has a model, rows,
and a stand-in for the package skyrl_gym, whose environments are not asked for anything here.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from shmbridge.httpd.door import Bounds

LIMIT = 8 << 20  # bytes of one body
BOUNDS = Bounds(
    connections=2000,
    head_s=2.0,
    body_bytes=LIMIT,
    bodies_bytes=2 * LIMIT,
    room_s=1.0,
    body_pause_s=1.5,
    body_s=5.0,
)


def gateway(bridge: str, folder: Path, compat: str = "default") -> None:
    from shmbridge.consumers.gateway import serve
    from shmbridge.consumers.gateway.limits import GatewayOptions
    from shmbridge.httpd.door import listen

    options = GatewayOptions(
        bridge,
        compat=compat,
        lane_bytes="1M",
        max_body_bytes=LIMIT,
        held_bytes=2 * LIMIT,
        post_deadline_s=2.0,
        bounds=BOUNDS,
    )
    listener = listen("127.0.0.1", 0)
    serve(options, listener, lambda: print(listener.getsockname()[1], flush=True))


def policy(bridge: str, folder: Path) -> None:
    from shmbridge.consumers.policy_server import __main__ as program
    from shmbridge.consumers.policy_server import server

    made = server.PolicyServer
    program.PolicyServer = lambda *given: made(*given, bounds=BOUNDS)  # type: ignore[assignment,misc]
    server.tell = lambda _, text: print(text.split(":")[2].split()[0], flush=True)
    sys.exit(program.main(["--model", str(folder / "model"), "--port", "0"]))


def environments(bridge: str, folder: Path) -> None:
    from shmbridge.producers.skyrl_gym import env_server

    sys.path.insert(0, str(folder))
    os.chdir(folder)
    os.environ[env_server.SECRET] = "secret"
    env_server.BOUNDS = BOUNDS
    sys.argv = ["env_server.py", "--repo_id", str(folder / "rows.jsonl"), "--ready-fd", str(os.dup(1))]
    env_server.main()


def scrapes(bridge: str, folder: Path) -> None:
    from shmbridge.watch.exporter import Exporter, ScrapeServer

    bounds = Bounds(connections=64, head_s=2.0, body_bytes=0, body_pause_s=1.5, body_s=5.0)
    with ScrapeServer(("127.0.0.1", 0), Exporter(lambda: [bridge]), bounds=bounds) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


def verifiers(bridge: str, folder: Path) -> None:
    """The door before a stand-in of an inference server, which answers one body alone and counts all."""
    from aiohttp import web

    from shmbridge.producers.rollout import HttpServer
    from shmbridge.producers.verifiers.door import GENERATE, Door

    came: list[int] = []

    async def generate(request: Any) -> Any:
        body = await request.read()
        came.append(len(body))
        return web.json_response({}, status=200 if body == b'{"token_ids": [1]}' else 400)

    async def count(request: Any) -> Any:
        return web.json_response({"came": len(came), "most": max(came, default=0)})

    async def serve() -> None:
        application = web.Application(client_max_size=4 * LIMIT)
        application.router.add_post(GENERATE, generate)
        application.router.add_get("/came", count)
        # of the connections that tests count none is kept between the door and what it asks
        runner = web.AppRunner(application, shutdown_timeout=1, keepalive_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server, over = HttpServer("http://{}:{}".format(*runner.addresses[0]), api="vllm"), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        door = Door(server, BOUNDS)
        door._secret = "secret"
        async with door:
            print(door.url.split(":")[2].split("/")[0], flush=True)
            await over.wait()
        await server.close()
        await runner.cleanup()

    asyncio.run(serve())


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    kind, bridge, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if kind == "strict":
        gateway(bridge, folder, "strict")
    else:
        globals()[kind](bridge, folder)
