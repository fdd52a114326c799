"""torch.multiprocessing: a queue of tensors, each in a shared memory object of its own.

Does: move the tensors' bytes without the pipe: put copies a tensor into a new shared object, the consumer
maps it; handles go through a pickled queue, file descriptors through a socket of the producer. Does not:
reuse memory (an object, a mapping and page faults per tensor), move anything when the producer has gone (it
keeps the descriptors), bound the memory, survive a death in the middle of the queue. At most 128 groups are
in flight: each tensor there costs a descriptor.
"""

import resource
from typing import Any

from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import Array

NAME = "torch.multiprocessing"
NEEDS = ("torch",)
INSTALL = "pip install torch"

_MOST_IN_FLIGHT = 128


class Reader(contract.Reader):
    """Maps what it gets, reads it through NumPy, lets go of it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        import torch.multiprocessing as mp

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # children inherit it
        self.address: Any = mp.get_context("spawn").Queue(min(plan.in_flight, _MOST_IN_FLIGHT))

    def read_one(self) -> int:
        return sum(touch(tensor.numpy()) for tensor in self.address.get(timeout=READ_TIMEOUT_S))

    def close(self) -> None:
        _close(self.address)


class Writer(contract.Writer):
    """Puts lists of CPU tensors, fresh ones: a tensor that was sent before is in shared memory already, and
    would not be copied again.
    """

    def __init__(self, address: Any, plan: Plan) -> None:
        super().__init__(address, plan)
        import torch

        torch.set_num_threads(1)
        self._queue, self._tensor = address, torch.from_numpy

    def write_one(self, group: list[Array]) -> None:
        self._queue.put([self._tensor(column) for column in group], timeout=READ_TIMEOUT_S)

    def close(self) -> None:
        _close(self._queue)


def _close(queue: Any) -> None:
    queue.close()
    queue.join_thread()
