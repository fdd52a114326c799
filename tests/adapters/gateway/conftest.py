"""Gateways and the original for a test, ended after it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("requests")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_clients import GatewayProcess, UpstreamProcess


@pytest.fixture
def start_gateway(bridge: str, tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """Starts a gateway on the test's bridge, with more arguments; lanes of 1 MiB unless said otherwise."""
    with contextlib.ExitStack() as started:

        def start(*arguments: str, lane_bytes: str = "1M", own_socket: bool = True) -> GatewayProcess:
            log = tmp_path / f"gateway{os.urandom(2).hex()}.log"
            listener = (
                None
                if own_socket
                else started.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
            )
            gateway = GatewayProcess(
                log, "--bridge", bridge, "--lane-bytes", lane_bytes, *arguments, listener=listener
            )
            started.callback(lambda: gateway.process.poll() is None and gateway.end())
            return gateway

        yield start


@pytest.fixture
def gateway(start_gateway: Callable[..., GatewayProcess]) -> GatewayProcess:
    return start_gateway()


@pytest.fixture
def strict(start_gateway: Callable[..., GatewayProcess]) -> GatewayProcess:
    return start_gateway("--compat", "strict")


@pytest.fixture(scope="session")
def upstream_process() -> Iterator[UpstreamProcess]:
    pytest.importorskip("atroposlib")
    process = UpstreamProcess()
    yield process
    if process.process.poll() is None:
        process.end()


@pytest.fixture
def upstream(upstream_process: UpstreamProcess) -> UpstreamProcess:
    """The original, with nothing registered."""
    assert upstream_process.get("/as-if-started-again").status_code == 200
    return upstream_process
