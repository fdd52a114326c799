"""The contenders: one file each, one contract (shmbridge.bench.contract); each docstring says what that transport does and does not do."""

import importlib
from importlib.util import find_spec
from typing import cast

from shmbridge.bench.contract import Contender

LIMIT, RING = "limit", "ring"
CONTENDERS = (
    LIMIT, RING, "numpy_slots", "iceoryx", "faster_fifo_queue", "zmq_ipc", "torch_queue", "mp_queue", "ray_actor", "transfer_queue_store",
)  # fmt: skip
PEERS = CONTENDERS[2:]


def load(name: str) -> Contender:
    """The contender's module; ImportError if what it measures is not installed."""
    if name not in CONTENDERS:
        raise ValueError(f"no contender {name!r}; there are {', '.join(CONTENDERS)}")
    return cast(Contender, importlib.import_module(f"shmbridge.bench.baselines.{name}"))


def missing(name: str) -> str | None:
    """What has to be installed before this contender can be measured; None if it can be."""
    absent = [package for package in load(name).NEEDS if find_spec(package) is None]
    return ", ".join(absent) or None
