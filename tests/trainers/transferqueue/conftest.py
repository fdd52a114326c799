"""One Ray cluster and one queue for all tests, and other processes that run what they are told."""

import os

os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import importlib.util
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray

from shmbridge.consumers import transfer_queue as room
from shmbridge.segments import bridge_names, sweep_bridge, value_names

HOOK = {"worker_process_setup_hook": "shmbridge.consumers.transfer_queue.register"}
EXAMPLE = Path(__file__).parents[3] / "examples" / "transferqueue_backend.py"
_numbers = count()


@ray.remote(num_cpus=0, max_restarts=0)
class Peer:
    """A process of its own, with a client of the queue."""

    def __init__(self) -> None:
        import transfer_queue as tq

        tq.init()

    def pid(self) -> int:
        return os.getpid()

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray, with slots for the actors of TransferQueue."""
    room.register()
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env=HOOK,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def queue(cluster) -> Iterator[str]:
    """The bridge of a queue that this process began."""
    import transfer_queue as tq

    bridge = f"t-tq-{os.getpid()}"
    tq.init({"backend": {"storage_backend": "shmbridge", "shmbridge": {"bridge": bridge}}})
    yield bridge
    tq.close()
    assert value_names(bridge) == [], "the queue's values go with it"
    deadline = time.monotonic() + 30
    while bridge in bridge_names():  # until Ray has ended its workers
        sweep_bridge(bridge)
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="session")
def peers(queue) -> Iterator[Callable[[], Any]]:
    """Makes processes with a client of the queue."""
    made = []

    def make() -> Any:
        made.append(Peer.remote())
        ray.get(made[-1].pid.remote())
        return made[-1]

    yield make
    for each in made:
        ray.kill(each)


@pytest.fixture(scope="session")
def peer(peers) -> Any:
    """One of them, for tests that kill nobody."""
    return peers()


@pytest.fixture
def there(peer) -> Callable[..., Any]:
    """Calls a function in another process."""
    return lambda call, *args: ray.get(peer.run.remote(call, *args))


@pytest.fixture
def partition(queue) -> Iterator[str]:
    """A partition of its own, cleared at the end; then nothing of it may be left in shared memory."""
    import transfer_queue as tq

    name = f"part{next(_numbers)}"
    yield name
    if keys := list(tq.kv_list(name).get(name, {})):
        tq.kv_clear(keys, name)
    assert value_names(queue) == []


@pytest.fixture(scope="session")
def example() -> Any:
    """examples/transferqueue_backend.py."""
    spec = importlib.util.spec_from_file_location("transferqueue_backend", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
