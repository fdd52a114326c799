"""Two bridges of this machine, as of two nodes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shmbridge
from shmbridge.relay.destination import Destination
from shmbridge.relay.source import Source

sys.path.insert(0, str(Path(__file__).parent))  # for relaying
NODE = "env-1"


@pytest.fixture
def elsewhere(bridge: str) -> Iterator[str]:
    """The bridge of the other node."""
    name = f"{bridge}2"
    yield name
    shmbridge.clean(name, dry_run=False)


@pytest.fixture
def make_source(elsewhere) -> Iterator[Callable[..., Source]]:
    made: list[Source] = []

    def make(node: str = NODE) -> Source:
        made.append(Source(elsewhere, node))
        return made[-1]

    yield make
    while made:
        made.pop().close()


@pytest.fixture
def make_destination(bridge) -> Iterator[Callable[..., Destination]]:
    made: list[Destination] = []

    def make(**options) -> Destination:
        made.append(Destination(bridge, **{"lane_bytes": 256 << 10, "wait_s": 0.0, **options}))
        return made[-1]

    yield make
    while made:
        made.pop().close()


@pytest.fixture
def put_there(elsewhere) -> Iterator[Callable[..., shmbridge.Producer]]:
    """Makes producers of the other node's bridge."""
    made: list[shmbridge.Producer] = []

    def make(**options) -> shmbridge.Producer:
        made.append(shmbridge.Producer(elsewhere, **{"env_name": "gsm8k", "lane_bytes": "256K", **options}))
        return made[-1]

    yield make
    while made:
        made.pop().close()
