"""iceoryx2: publish and subscribe through shared memory, samples loaned and read in place.

Does: zero-copy both ways, several publishers, no broker; other processes notice a process's death and clean
up after it. Does not: keep samples beyond their publisher (samples that a dead one had sent and that were not
taken are gone), sleep while it waits here (its pub/sub polls; events are a service of their own), know
columns: one memmove per column into the sample, one view of it on the other side. A publisher whose
subscriber's buffer is full retries until there is room.
"""

import ctypes
import os
from time import monotonic
from typing import Any

from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import Group, flat_columns

NAME = "iceoryx2"
NEEDS = ("iceoryx2",)
INSTALL = "pip install iceoryx2"


class Reader(contract.Reader):
    """The subscriber; yields its core between looks."""

    _services = 0

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        Reader._services += 1
        self.address = {"service": f"shmbridge-bench/{os.getpid()}/{Reader._services}"}
        self._node, self._service = _open(self.address["service"], plan)
        self._subscriber = self._service.subscriber_builder().buffer_size(_samples(plan)).create()

    def read_one(self) -> int:
        sample = self._subscriber.receive()
        if sample is None:
            deadline = monotonic() + READ_TIMEOUT_S
            while (sample := self._subscriber.receive()) is None:
                os.sched_yield()
                if monotonic() > deadline:
                    raise TimeoutError(f"no sample for {READ_TIMEOUT_S} s")
        for _ in range(self.plan.reads):
            total = touch(sample.payload().as_memory_view())
        sample.delete()
        return total

    def close(self) -> None:
        self._subscriber.delete()
        del self._subscriber, self._service, self._node


class Writer(contract.Writer):
    """The publisher; a sample is loaned, filled and sent."""

    def __init__(self, address: dict[str, str], plan: Plan) -> None:
        super().__init__(address, plan)
        import iceoryx2 as iox

        self._node, service = _open(address["service"], plan)
        builder = service.publisher_builder().initial_max_slice_len(plan.shape.bytes).max_loaned_samples(1)
        self._publisher = builder.backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered).create()

    def prepare(self, groups: list[Group]) -> list[list[tuple[int, int, Any]]]:
        """(where it is, bytes, what keeps it) of each column."""
        return [
            [(column.ctypes.data, column.nbytes, column) for column in flat_columns(group)]
            for group in groups
        ]

    def write_one(self, group: list[tuple[int, int, Any]]) -> None:
        sample = self._publisher.loan_slice_uninit(self.plan.shape.bytes)
        at = sample.payload_ptr
        for source, size, _ in group:
            ctypes.memmove(at, source, size)
            at += size
        sample.assume_init().send()


def _samples(plan: Plan) -> int:
    return plan.in_flight


def _open(name: str, plan: Plan) -> tuple[Any, Any]:
    import iceoryx2 as iox

    iox.set_log_level(iox.LogLevel.Error)
    node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
    service = node.service_builder(iox.ServiceName.new(name)).publish_subscribe(iox.Slice[ctypes.c_uint8])
    service = (
        service.enable_safe_overflow(False)
        .history_size(0)
        .subscriber_max_borrowed_samples(2)
        .max_publishers(16)
    )
    return node, service.subscriber_max_buffer_size(_samples(plan)).open_or_create()
