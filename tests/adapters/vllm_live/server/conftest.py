"""One vLLM server for all tests of this folder, started as anybody would with the middleware, and learners
beside it.

Tests come in any order: each publishes versions that no other has, above those before. The seed of a
version's weights is its number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from live_server import Learner, Server, until

import shmbridge


@pytest.fixture(scope="package")
def bridge() -> Iterator[str]:
    name = f"vllm-server-{os.getpid()}"
    yield name
    until(lambda: not shmbridge.clean(name, dry_run=False).kept, "a segment is still in use")


@pytest.fixture(scope="package")
def server(tiny_folder, bridge, tmp_path_factory) -> Iterator[Server]:
    server = Server(tiny_folder(0), bridge, tmp_path_factory.mktemp("server") / "server.log")
    try:
        until(server.is_up, "the server did not come up")
        server.at_first = server.generate(), server.policy(), server.ask("/v1/models")[2]
        yield server
    finally:
        server.end()


@pytest.fixture
def learner(learner_python, bridge) -> Iterator[Callable[[], Learner]]:
    """Yield a maker of learners, one at a time; the last is ended."""
    made: list[Learner] = []

    def make() -> Learner:
        made.append(Learner(learner_python, bridge))
        return made[-1]

    yield make
    for each in made:
        each.kill()


@pytest.fixture(scope="package")
def new_versions() -> Callable[[int], range]:
    """Call it for so many versions, above all that it gave before."""
    given = [range(1)]

    def more(count: int) -> range:
        given.append(range(given[-1].stop, given[-1].stop + count))
        return given[-1]

    return more
