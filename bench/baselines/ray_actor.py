"""Ray: a producer actor returns groups, the driver gets them from the object store.

Does: move arrays through shared memory (pickle 5, out of band: one copy in, read in place), on one node or
between nodes, with tasks, retries and resources around them. Does not: keep groups of a dead owner (its
objects go with it, unless a task can be run again), tell the store's memory from the network's: a group costs
a task, a few messages between worker, raylet and driver. Groups up to 100 KB come inside the answer and not
from the store. Two processes, as for the others; raylet and control store run beside them, unpinned, and
their CPU is not counted. As many tasks are under way as groups fit in the lane of the others, 256 at most.
"""

import os
import time
from collections import deque
from typing import Any

from shmbridge.bench import contract, groups
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import Array, flat_columns

NAME = "Ray actor"
NEEDS = ("ray",)
INSTALL = "pip install ray"

_MOST_TASKS = 256
_STORE_BYTES = 512 << 20


def join(plan: Plan) -> None:
    """Starts Ray on all cores, and not on the one this process is pinned to."""
    import ray

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, plan.cores.all)
    quiet = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(quiet)
    ray.init(
        num_cpus=8,
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        namespace="shmbridge-bench",
        _node_ip_address="127.0.0.1",
    )
    os.sched_setaffinity(0, before)


class Reader(contract.Reader):
    """The driver: keeps the actors busy and gets what they return, in order."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        import ray

        self._ray = ray
        join(plan)
        self.address = self
        self._due: deque[Any] = deque()  # actors, one entry for each group still to be asked for
        self._under_way: deque[Any] = deque()

    def ask(self, actor: Any, count: int) -> None:
        """`count` groups of that actor are to come."""
        self._due.extend((actor, n) for n in range(count))
        self._fill()

    def _fill(self) -> None:
        while self._due and len(self._under_way) < min(self.plan.in_flight, _MOST_TASKS):
            actor, n = self._due.popleft()
            self._under_way.append(actor.make.remote(n))

    def read_one(self) -> int:
        group = self._ray.get(self._under_way.popleft(), timeout=READ_TIMEOUT_S)
        total = sum(map(touch, group))
        del group
        self._fill()
        return total

    def close(self) -> None:
        self._ray.shutdown()


class Writer(contract.Writer):
    """Not used: an actor is the producer."""


class Maker:
    """The actor: a pinned process that returns its groups in turn."""

    def __init__(self, plan: Plan, core: int) -> None:
        os.sched_setaffinity(0, {core})
        self._groups: list[list[Array]] = [
            flat_columns(group) for group in groups.sources(plan.shape, "arrays")
        ]

    def make(self, n: int) -> list[Array]:
        return self._groups[n % len(self._groups)]

    def cpu_s(self) -> float:
        return time.process_time()


class start:
    """An actor as a WriterProcess."""

    def __init__(self, plan: Plan, reader: Reader, number: int) -> None:
        import ray

        self._ray, self._reader, self._began = ray, reader, 0.0
        self._actor = ray.remote(Maker).options(num_cpus=0).remote(plan, plan.cores.of_producer(number))

    def ready(self) -> None:
        self._began = self._ray.get(self._actor.cpu_s.remote())

    def begin(self, count: int) -> None:
        self.ready()
        self._reader.ask(self._actor, count)

    def end(self) -> float:
        return float(self._ray.get(self._actor.cpu_s.remote())) - self._began

    def close(self) -> None:
        self._ray.kill(self._actor)
