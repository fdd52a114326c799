"""A server in its program's event loop: what a start leaves that fails, and what is never taken."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from shmbridge.errors import BadArgument
from shmbridge.httpd.door import Bounds
from shmbridge.httpd.server import LoopServer

HANDED_OVER = """
import asyncio, os, socket
from tests.faults.hostile.test_loop_server import served

os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")

async def main():
    async with served() as server:
        print(server.url)
    print(socket.socket(fileno=3).getsockname()[1])

asyncio.run(main())
"""


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


def served(port: int = 0) -> LoopServer:
    bounds = Bounds()
    return LoopServer(nothing, check=lambda _: None, reads=lambda *_: False, bounds=bounds, port=port)


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    """No task, and nobody who listens."""
    before = asyncio.all_tasks()
    for turns in range(4):  # of the loop; it serves after some
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        starting = asyncio.create_task(served(port).__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert asyncio.all_tasks() == before
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


async def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = asyncio.all_tasks()
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(BadArgument, match="the port is in use"):
        await served(taken.getsockname()[1]).start()
    server = served()

    async def fails(sockets: Any = None) -> None:
        raise OSError("no loop")

    monkeypatch.setattr(server._server, "startup", fails)
    with pytest.raises(OSError, match="no loop"):
        await server.start()
    assert asyncio.all_tasks() == before


def test_a_socket_handed_over_is_left_to_the_program() -> None:
    """systemd meant it for what the program serves itself, maybe to all networks."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        shell = [
            "bash",
            "-c",
            f'exec 3<&{listener.fileno()}; exec "$@"',
            "-",
            sys.executable,
            "-c",
            HANDED_OVER,
        ]
        done = subprocess.run(
            shell,
            pass_fds=[listener.fileno()],
            capture_output=True,
            text=True,
            timeout=100,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.returncode == 0, done.stderr
    url, handed = done.stdout.split()
    assert handed == str(port)
    assert url.startswith("http://127.0.0.1:")
    assert not url.endswith(f":{port}")
