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

from gateway_clients import GatewayProcess, SharedGateway, UpstreamProcess

import shmbridge


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


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, ...], SharedGateway]]:
    """The gateways of a module, by their arguments."""
    found: dict[tuple[str, ...], SharedGateway] = {}
    yield found
    for arguments, gateway in found.items():
        if gateway.process.poll() is None:
            gateway.end()
        shmbridge.clean(arguments[1], dry_run=False)


@pytest.fixture
def shared_gateway(
    gateways: dict[tuple[str, ...], SharedGateway], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., SharedGateway]:
    """Returns a gateway with these arguments, whose bridge no other test of the module uses at the time."""

    def shared(*arguments: str, lane_bytes: str = "1M") -> SharedGateway:
        known = next((each for each in gateways if each[2:] == (*arguments, lane_bytes)), None)
        if known is None:
            name = f"t-shared-{os.getpid()}-{os.urandom(2).hex()}"
            known = ("--bridge", name, *arguments, lane_bytes)
            log = tmp_path_factory.mktemp("gateway") / "log"
            gateways[known] = SharedGateway(log, "--bridge", name, "--lane-bytes", lane_bytes, *arguments)
        gateways[known].begin()
        return gateways[known]

    return shared


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
