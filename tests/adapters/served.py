"""A policy server in this event loop, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp

from shmbridge.consumers.policy_server.server import PolicyServer
from shmbridge.httpd.server import Server


class _Server(Server):
    """Leaves the test's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Client:
    """Asks one server; `session` is aiohttp's."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session, self.port = session, port

    def make_url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def request(self, method: str, path: str, **more: Any) -> aiohttp.ClientResponse:
        return await self._session.request(method, self.make_url(path), **more)

    async def get(self, path: str) -> aiohttp.ClientResponse:
        return await self.request("GET", path)

    async def post(self, path: str, **more: Any) -> aiohttp.ClientResponse:
        return await self.request("POST", path, **more)


@contextlib.asynccontextmanager
async def served(application: PolicyServer) -> AsyncIterator[Client]:
    """Serves for the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready = asyncio.Event()
    server = _Server(application, application.bounds, ready=ready.set)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await ready.wait()
        async with aiohttp.ClientSession() as session:
            yield Client(session, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving
        application.close()
