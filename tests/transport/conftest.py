"""Both ends of a control plane over a real socket, with a hub that has only state."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmbridge.control.messages import Register
from shmbridge.control.server import ControlClient, ControlServer
from shmbridge.testing.fixtures import FakeHub

sys.path.insert(0, str(Path(__file__).parent))  # for interrupts


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


@pytest.fixture
def server(bridge: str, hub: FakeHub) -> Iterator[ControlServer]:
    server = ControlServer(bridge, hub)
    yield server
    server.close()


@pytest.fixture
def client(bridge: str, server: ControlServer) -> Iterator[ControlClient]:
    with ControlClient(bridge, role="test", name="t") as client:
        yield client


@pytest.fixture
def env() -> Callable[..., Register]:
    """Call it for an environment's registration: `env(desired_name, producer_id, **other_fields)`."""

    def register(name: str, producer_id: str, **changes: object) -> Register:
        fields = {"max_token_length": 512, "group_size": 4, "producer_id": producer_id}
        return Register(desired_name=name, **(fields | changes))

    return register
