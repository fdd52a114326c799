"""What users write, as type checkers and IDEs see it; never run. A line marked `# error` must be one."""

import asyncio

import numpy as np
import torch

import shmbridge
from shmbridge.consumers import BridgeDataset, WeightSync, losses
from shmbridge.consumers.advantages import group_advantages
from shmbridge.consumers.trl import shm_rollout_func


def environment() -> None:
    with shmbridge.Producer("run1", env_name="gsm8k", lane_bytes="64M", on_full="block") as producer:
        group = {"tokens": [[1, 2, 3]], "score": np.array([1.0]), "loss_mask": [[0, 1, 1]]}
        sequence = producer.put(group, group_id=3, policy_version=producer.policy_version)
        assert sequence is None or sequence >= 0
        producer.put(group, polcy_version=1)  # error
        shmbridge.Producer("run1", on_full="wait")  # error
        with producer.claim(1, {"tokens": [3]}) as slot:
            slot["tokens"][:] = 1


async def asynchronous(consumer: shmbridge.Consumer) -> None:
    async with shmbridge.Producer("run1") as producer:
        await producer.put_async({"tokens": [[1]]})
    async for batch in consumer.batches(groups=8):
        print(batch.tokens.dtype, batch.tokenz)  # error
    record = await consumer.get_async(timeout_s=5)
    record.release()


def learner() -> None:
    with shmbridge.Consumer("run1", run=shmbridge.Run(batch_size=8), replace=True) as consumer:
        for batch in consumer.batches(groups=8, layout="packed"):
            ids = torch.from_numpy(batch.tokens.astype("int64"))
            rows = group_advantages(batch["scores"], batch.group_index)
            own = batch.advantages
            print(own.sum())  # error
            filled = batch.advantages_or(0.0) + 1.0
            components = batch.reward_components
            if components is not None:
                print(components[0]["format"])
            print(ids.shape, rows.shape, filled.shape, batch.cu_seqlens, batch.meta[0].group_id)
            print(batch.loss_mask.sum(), batch.step_rewards, batch.lenghts)  # error
            print(losses.batch_logprobs(torch.nn.Linear(1, 1), batch))
        for wrong in consumer.batches(layout="packd"):  # error
            print(wrong)
        server = consumer.serve_ranks(2, groups=8)
        print(server.idle, server.book)  # error


def records(consumer: shmbridge.Consumer) -> None:
    with consumer.get(5) as record:
        print(record["tokens"].values, record["tokens"][0], record["score"].mean())
        print(record["tokens"].valuse)  # error
        print(record["score"].lengths)  # error
        print(record.tokens.lengths, record["mine"], dict(record), record.keys())
        print(record.tokenz)  # error
        print(record.meta.policy_version)  # error
        masks = record.loss_mask
        if masks is not None:
            print(masks.values)
    for name, column in record.items():
        print(name, column)
    consumer.step_done()
    for tensors in BridgeDataset("run1", groups=4):
        print(tensors["tokens"])
    with WeightSync("run1", "http://127.0.0.1:8000", announce=consumer.publish_policy_version) as sync:
        print(sync.push(torch.nn.Linear(1, 1)) + 1, sync.versoin)  # error
    print(BridgeDataset("run1", hold="epoch"))  # error


asyncio.run(asynchronous(shmbridge.Consumer("run1")))


def trainer() -> None:
    with shm_rollout_func("run1", max_staleness=2) as rollouts:
        print(rollouts.stats(), rollouts.statz())  # error
