"""Rollouts from a bridge into TransferQueue, whose values lie in shared memory, and out in another process.

    python examples/transferqueue_backend.py

An environment puts two groups into a lane. This process takes them as a batch, gives their rows the names of
verl's records and puts them into TransferQueue. A Ray worker reads them, in place. Needs the packages of
`pip install 'shmbridge[transferqueue]'`.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

import shmbridge
from shmbridge.consumers import transfer_queue as room
from shmbridge.consumers.trajectories import trajectories

PARTITION = "train"


def verl_fields(batch: shmbridge.Batch) -> tuple[list[str], TensorDict, list[dict[str, Any]]]:
    """Returns keys, fields and tags of a batch's rows, as verl 0.9 names them; one copy per token."""
    rows, _ = trajectories(batch)
    parts = {
        "prompts": ([row.tokens[: row.prompt_length] for row in rows], np.int64),
        "responses": ([row.tokens[row.response] for row in rows], np.int64),
        "input_ids": ([row.tokens for row in rows], np.int64),
        "position_ids": ([np.arange(len(row.tokens)) for row in rows], np.int64),
        "response_mask": ([row.trained[row.response] for row in rows], np.int64),
        "rm_scores": ([row.advantages[row.response] for row in rows], np.float32),
    }
    if all(row.logprobs is not None for row in rows):
        parts["rollout_log_probs"] = (
            [row.logprobs[row.response] for row in rows if row.logprobs is not None],
            np.float32,
        )
    fields: dict[str, Any] = {name: jagged(*part) for name, part in parts.items()}
    uids = [row.meta.group_id.replace("_", "-") for row in rows]  # verl splits keys at underscores
    versions = [
        {"min_global_steps": row.meta.min_policy_version, "max_global_steps": row.meta.max_policy_version}
        for row in rows
    ]
    fields |= {"uid": NonTensorStack(*uids), "extra_fields": NonTensorStack(*versions)}
    keys = [f"{uid}_{row.number}_0" for uid, row in zip(uids, rows, strict=True)]
    tags = [
        {"status": "finished", "seq_len": len(row.tokens), **each}
        for row, each in zip(rows, versions, strict=True)
    ]
    return keys, TensorDict(fields, batch_size=len(rows)), tags


def jagged(rows: list[np.ndarray], dtype: type) -> torch.Tensor:
    """Returns rows of different lengths as one nested tensor, without a tensor for each."""
    ends = np.cumsum([0, *map(len, rows)])
    return torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(np.concatenate(rows).astype(dtype)), torch.from_numpy(ends)
    )


@ray.remote(num_cpus=1)
def read(keys: list[str]) -> tuple[int, int, float]:
    """Another process: its pid, the tokens it read, and the sum of their advantages."""
    tq.init()  # and no tq.close(): that would end the controller, for everybody
    rows = tq.kv_batch_get(keys, PARTITION, select_fields=["input_ids", "rm_scores"])
    return os.getpid(), rows["input_ids"].values().numel(), float(rows["rm_scores"].values().sum())


def main() -> None:
    bridge = f"transferqueue-example-{os.getpid()}"
    room.register()
    ray.init(
        num_cpus=8,  # the controller of TransferQueue takes one; this is a number of slots, not of cores
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"worker_process_setup_hook": "shmbridge.consumers.transfer_queue.register"},
    )
    tq.init({"backend": {"storage_backend": "shmbridge", "shmbridge": {"bridge": bridge}}})
    with shmbridge.Producer(bridge, env_name="example") as producer, shmbridge.Consumer(bridge) as consumer:
        for number in range(2):
            producer.put(
                {
                    "tokens": [[1, 2, 3, 4], [1, 2, 5]],
                    "prompt_length": [2, 2],
                    "loss_mask": [[0, 0, 1, 1], [0, 0, 1]],
                    "advantages": [[0, 0, 0.5, 1.5], [0, 0, -1.0]],
                    "inference_logprobs": [[0, 0, -0.1, -0.2], [0, 0, -0.3]],
                },
                group_id=number,
                policy_version=7,
            )
        batch = next(iter(consumer.batches(groups=2, layout="packed")))
        keys, fields, tags = verl_fields(batch)
        tq.kv_batch_put(keys, PARTITION, fields, tags)
        batch.release()  # the rows are in the queue now, and outlive this process' lanes
        pid, tokens, advantages = ray.get(read.remote(keys))
        print(f"process {pid} read {tokens} tokens with advantages of {advantages:g} in all")
        tq.kv_clear(keys, PARTITION)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
