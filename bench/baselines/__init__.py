"""The contenders: one file each, one contract (shmbridge.bench.contract); each docstring lists the features
that its transport has and lacks.
"""

import importlib
from importlib.util import find_spec
from typing import cast

from shmbridge.bench.contract import Contender

LIMIT, RING = "limit", "ring"
CONTENDERS = (
    LIMIT,
    RING,
    "numpy_slots",
    "iceoryx",
    "faster_fifo_queue",
    "zmq_ipc",
    "torch_queue",
    "mp_queue",
    "ray_actor",
    "transfer_queue_store",
)
PEERS = CONTENDERS[2:]
ONE_PRODUCER = (LIMIT, "numpy_slots", "transfer_queue_store")


def load(name: str) -> Contender:
    """The contender's module; it imports the measured package only when its Reader or Writer is made."""
    if name not in CONTENDERS:
        raise ValueError(f"no contender {name!r}; there are {', '.join(CONTENDERS)}")
    return cast(Contender, importlib.import_module(f"shmbridge.bench.baselines.{name}"))


def missing(name: str) -> str | None:
    """How to install what is needed to measure this contender; None if it is there."""
    contender = load(name)
    return contender.INSTALL if any(find_spec(package) is None for package in contender.NEEDS) else None
