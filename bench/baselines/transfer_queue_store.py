"""TransferQueue with its SimpleStorage: the data system that verl moves rollouts with.

One partition per group: put, get_meta, get_data, clear.

Does: keep rows and columns in storage actors that several tasks read, each row once per task, on one node or
many; columns of one row may come from different writers at different times. Does not: share memory (rows go
through ZeroMQ sockets into a storage process and out of it), push back (a writer is not made to wait; a round
here is small enough), promise anything when a storage actor dies. Four processes: producer, consumer,
controller and storage, the latter two in Ray, unpinned, and their CPU is not counted.
"""

import os
import time
from itertools import count
from typing import Any

from shmbridge.bench import contract
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.baselines.ray_actor import join
from shmbridge.bench.contract import READ_TIMEOUT_S, Plan
from shmbridge.bench.groups import Group, Shape

NAME = "TransferQueue"
NEEDS = ("transfer_queue", "tensordict", "torch", "ray")
INSTALL = "pip install TransferQueue"

_QUIET = {"TQ_LOGGING_LEVEL": "ERROR"}
_LOOK_AGAIN_S = 0.0002  # a controller that waits itself could take no put at that time


class Reader(contract.Reader):
    """Starts Ray, controller and one storage unit; waits for partition after partition."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        os.environ.update(_QUIET)
        import ray
        import torch
        import transfer_queue

        torch.set_num_threads(1)
        join(plan)
        self._ray, self._transfer_queue = ray, transfer_queue
        transfer_queue.init(
            {
                "controller": {"polling_mode": True},
                "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
            }
        )
        self._client = transfer_queue.get_client()
        self.address = {"ray": ray.get_runtime_context().gcs_address}
        self._partitions = map(str, count())
        self._fields = _fields(plan.shape)

    def read_one(self) -> int:
        partition, rows = next(self._partitions), self.plan.shape.rows
        deadline = time.monotonic() + READ_TIMEOUT_S
        while (
            meta := self._client.get_meta(self._fields, rows, partition, mode="fetch", task_name="bench")
        ).size == 0:
            time.sleep(_LOOK_AGAIN_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no partition {partition} for {READ_TIMEOUT_S} s")
        data = self._client.get_data(meta)
        total = sum(touch(row.numpy()) for name in self._fields for row in data[name].unbind())
        self._client.clear_partition(partition)
        return total

    def close(self) -> None:
        self._transfer_queue.close()
        self._ray.shutdown()


class Writer(contract.Writer):
    """Joins that Ray cluster and puts a TensorDict of (rows, length) tensors for each group."""

    def __init__(self, address: dict[str, str], plan: Plan) -> None:
        super().__init__(address, plan)
        os.environ.update(_QUIET)
        import ray
        import torch
        import transfer_queue

        torch.set_num_threads(1)
        ray.init(
            address=address["ray"], log_to_driver=False, logging_level="error", namespace="shmbridge-bench"
        )
        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._partitions = map(str, count())

    def prepare(self, groups: list[Group]) -> list[Any]:
        import torch
        from tensordict import TensorDict

        shape = self.plan.shape
        made = []
        for group in groups:
            fields = {
                name: torch.from_numpy(group[name][0].reshape(shape.rows, shape.length))
                for name in shape.columns
            }
            if shape.has_score:
                fields["score"] = torch.tensor(group["scores"], dtype=torch.float64)
            made.append(TensorDict(fields, batch_size=shape.rows))
        return made

    def write_one(self, group: Any) -> None:
        self._client.put(group, partition_id=next(self._partitions))

    def close(self) -> None:
        import ray

        ray.shutdown()


def _fields(shape: Shape) -> list[str]:
    return [*shape.columns, "score"] if shape.has_score else list(shape.columns)
