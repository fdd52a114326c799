"""Groups from one node of a Ray cluster to another, on this machine: by relays, by Ray's own queue actor, by
ray.put and ray.get, and by the two halves of a relay in one process, without Ray.

Knows a cluster of two nodes and the ways; the suite knows rounds. In every way an actor on the environments'
node hands over NumPy columns, and the calling process, on the learner's node, reads every byte in place.
"""

import os
import time
from collections import deque
from typing import Any, Self

import shmbridge
from shmbridge.bench import groups
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.groups import Array, Shape, flat_columns
from shmbridge.relay import wire
from shmbridge.relay.destination import Destination
from shmbridge.relay.source import Source
from shmbridge.testing import wait_until

LEARNER, ENVIRONMENTS = ("shmbridge", "learner"), ("shmbridge", "environments")
MODULO = 1 << 64
# What may be on its way, as in a relay's lane on the learner's node.
IN_FLIGHT = 16 << 20
_STORE_BYTES = 512 << 20
_TIMEOUT_S = 60.0
# Ray reads these when it is imported.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all stays on 127.0.0.1
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class TwoNodes:
    """The cluster, and this process as its driver; a context manager. `store_bytes`: of each object store."""

    def __init__(self, store_bytes: int = _STORE_BYTES) -> None:
        self._store_bytes = store_bytes

    def __enter__(self) -> Self:
        import ray
        from ray.cluster_utils import Cluster

        options: dict[str, Any] = {"num_cpus": 4, "object_store_memory": self._store_bytes}
        labels = {"shmbridge": "learner", "shmbridge-name": "learner"}
        self._cluster = Cluster(initialize_head=True, head_node_args=options | {"labels": labels})
        labels = {"shmbridge": "environments", "shmbridge-name": "env-1", "shmbridge-suffix": "-env"}
        self._cluster.add_node(**options, labels=labels)
        ray.init(
            address=self._cluster.address,
            namespace="shmbridge-bench",
            log_to_driver=False,
            logging_level="error",
        )
        here = ray.get_runtime_context().get_node_id()
        named = {node["NodeID"]: node["Labels"].get("shmbridge") for node in ray.nodes()}
        if named[here] != "learner":
            raise RuntimeError(f"this process is on the node {named[here]}, not on the learner's")
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


class Sender:
    """The actor: has its groups ready, and hands them over in turn."""

    def __init__(self, shape: Shape) -> None:
        self._groups = groups.sources(shape, "arrays")
        self._columns: list[list[Array]] = [flat_columns(group) for group in self._groups]
        self._producer: shmbridge.Producer | None = None

    def put(self, bridge: str, count: int) -> None:
        """Into the lane of the bridge on its node."""
        if self._producer is None:
            self._producer = shmbridge.Producer(bridge, "bench")
        for n in range(count):
            self._producer.put(self._groups[n % len(self._groups)], timeout_s=_TIMEOUT_S)

    def enqueue(self, queue: Any, count: int) -> None:
        """Into Ray's queue."""
        for n in range(count):
            queue.put(self._columns[n % len(self._columns)], timeout=_TIMEOUT_S)

    def objects(self, first: int, count: int) -> list[Any]:
        """Into the object store of its node; returns the references."""
        import ray

        return [ray.put(self._columns[n % len(self._columns)]) for n in range(first, first + count)]

    def close(self) -> None:
        """Leaves the bridge."""
        if self._producer is not None:
            self._producer.close()


class Way:
    """One way; `carry` moves that many groups and returns the sum of what was read. A context manager."""

    def __init__(self, shape: Shape) -> None:
        import ray

        self.shape = shape
        labels = dict([ENVIRONMENTS])
        self.sender = ray.remote(Sender).options(num_cpus=0, label_selector=labels).remote(shape)

    def carry(self, count: int) -> int:
        """Blocks until all of them were read."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.get(self.sender.close.remote(), timeout=_TIMEOUT_S)
        ray.kill(self.sender)


def remove(bridge: str) -> None:
    """Removes a bridge's segments once its actors, which were ended, are gone."""
    wait_until(lambda: not shmbridge.clean(bridge, dry_run=False).kept, 10.0)


class _Bridged(Way):
    """Both bridges, and the consumer on the learner's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bridge = f"bench-{os.getpid()}-{type(self).__name__.lower()}"
        self.there = f"{self.bridge}-env"
        self.consumer = shmbridge.Consumer(self.bridge)

    def look(self, record: shmbridge.Record) -> int:
        """Reads every byte, and releases."""
        with record:
            total = sum(touch(record[name].values) for name in self.shape.columns)
            return total + (touch(record["score"]) if self.shape.has_score else 0)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.consumer.close()
        for bridge in (self.bridge, self.there):
            remove(bridge)


class Relayed(_Bridged):
    """A source relay and a destination relay, with the options that users have by default."""

    def __init__(self, shape: Shape) -> None:
        from shmbridge.relay.ray import place

        super().__init__(shape)
        self._place = place
        place.Placement(place.Plan(self.bridge, ENVIRONMENTS, LEARNER)).reconcile()

    def carry(self, count: int) -> int:
        self.sender.put.remote(self.there, count)
        return sum(self.look(self.consumer.get(_TIMEOUT_S)) for _ in range(count)) % MODULO

    def pids(self) -> dict[str, int]:
        """The processes of the two relays, once both have reported."""
        said = self._place.report(self.bridge)
        if said is None or "pid" not in said.nodes.get("env-1", {}):
            return {}
        return {"source": int(said.nodes["env-1"]["pid"]), "destination": said.pid}

    def __exit__(self, *_: object) -> None:
        self._place.stop(self.bridge)
        super().__exit__()


class Halves(_Bridged):
    """The same two halves in this process, one after the other, and no Ray between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.source, self.destination = Source(self.there, "env-1"), Destination(self.bridge)
        self.parcels: list[tuple[int, int, float]] = []  # records, bytes, seconds in `accept`

    def carry(self, count: int) -> int:
        self.sender.put.remote(self.there, count)
        total = 0
        while count:
            requested_ns = time.monotonic_ns()
            parcel = wire.decode(wire.encode(self.source.pull(self.destination.request("env-1"))))
            began = time.perf_counter()
            size = self.destination.accept("env-1", parcel, requested_ns)
            self.parcels.append((len(parcel.records), size, time.perf_counter() - began))
            del parcel
            self.destination.work()
            while records := self.consumer.poll():
                total += sum(map(self.look, records))
                count -= len(records)
        return total % MODULO

    def __exit__(self, *_: object) -> None:
        self.destination.close()
        self.source.close()
        super().__exit__()


class Queued(Way):
    """ray.util.queue.Queue, its actor on the learner's node: `put` there, `get` here."""

    def __init__(self, shape: Shape) -> None:
        from ray.util.queue import Queue

        super().__init__(shape)
        options = {"num_cpus": 0, "label_selector": dict([LEARNER])}
        self._queue = Queue(max(IN_FLIGHT // shape.bytes, 2), actor_options=options)

    def carry(self, count: int) -> int:
        self.sender.enqueue.remote(self._queue, count)
        total = 0
        for _ in range(count):
            total += sum(map(touch, self._queue.get(timeout=_TIMEOUT_S)))
        return total % MODULO

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._queue.shutdown()


class Stored(Way):
    """ray.put there, ray.get here: an object for each group, as many references to a call as fit in a parcel,
    two calls under way, as a relay has it.
    """

    def carry(self, count: int) -> int:
        import ray

        each = max(IN_FLIGHT // 2 // self.shape.bytes, 1)
        asked, total, under_way = 0, 0, deque[Any]()
        while asked < count or under_way:
            while asked < count and len(under_way) < 2:
                some = min(each, count - asked)
                under_way.append(self.sender.objects.remote(asked, some))
                asked += some
            for group in ray.get(ray.get(under_way.popleft(), timeout=_TIMEOUT_S), timeout=_TIMEOUT_S):
                total += sum(map(touch, group))
        return total % MODULO


WAYS: dict[str, type[Way]] = {
    "relay": Relayed,
    "Ray's queue": Queued,
    "ray.put, ray.get": Stored,
    "relay's halves, without Ray": Halves,
}


def sum_of(shape: Shape, count: int) -> int:
    """What `carry` must return."""
    sums = [sum(map(touch, flat_columns(group))) for group in groups.sources(shape, "arrays")]
    whole, rest = divmod(count, len(sums))
    return (whole * sum(sums) + sum(sums[:rest])) % MODULO
