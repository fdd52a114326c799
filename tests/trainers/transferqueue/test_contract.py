"""What another process reads from TransferQueue is what was put: tests/trainers/contract.py."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq

import shmbridge
from shmbridge.testing.fixtures import loss_matrix
from tests.trainers.contract import Seen, assert_contract


def read(keys, partition):
    found = tq.kv_batch_get(keys, partition)
    names = list(found.keys())
    rows = {
        name: [row.numpy() for row in found[name].unbind()]
        if isinstance(found[name], torch.Tensor)
        else list(found[name])
        for name in names
    }
    return rows, list(tq.kv_list(partition)[partition].items())


@pytest.fixture(scope="module")
def arrived(queue, peer, example):
    """Name of the group -> (the group, its rows by field, their keys and tags) as read elsewhere."""
    groups, bridge, found = loss_matrix(), f"{queue}-lanes", {}
    with shmbridge.Producer(bridge) as producer, shmbridge.Consumer(bridge) as consumer:
        for group in groups:
            group.put(producer)
        for number, batch in zip(
            range(len(groups) - 1), consumer.batches(groups=1, layout="packed"), strict=False
        ):
            group = next(each for each in groups if each.group_id == batch.meta[0].group_id)
            keys, fields, tags = example.verl_fields(batch)
            partition = f"known{number}"
            tq.kv_batch_put(keys, partition, fields, tags)
            batch.release()
            found[group.name] = (group, *ray.get(peer.run.remote(read, keys, partition)))
            tq.kv_clear(keys, partition)
    return found


def rows_of(rows):
    """The rows of a group."""
    for at, tokens in enumerate(rows["input_ids"]):
        prompt = rows["prompts"][at]
        assert np.array_equal(tokens, np.append(prompt, rows["responses"][at]))
        assert np.array_equal(rows["position_ids"][at], np.arange(len(tokens)))
        arrays = [
            rows[name][at] if name in rows else None
            for name in ("response_mask", "rm_scores", "rollout_log_probs")
        ]
        yield Seen(
            tokens, *(each if each is None else np.append(np.zeros(len(prompt)), each) for each in arrays)
        )


def test_another_process_reads_what_was_put(arrived):
    seen = [row for _, rows, _ in arrived.values() for row in rows_of(rows)]
    assert_contract("TransferQueue, a store", version("TransferQueue"), "", loss_matrix(), seen)


def test_policy_versions_and_ids_arrive(arrived):
    group, rows, listed = arrived["many versions"]
    assert all(
        (each["min_global_steps"], each["max_global_steps"]) == group.versions
        for each in rows["extra_fields"]
    )
    assert all(tag["min_global_steps"] == group.versions[0] for _, tag in listed)
    assert set(rows["uid"]) == {group.group_id}
    assert [key.split("_") for key, _ in listed] == [
        [group.group_id, str(n), "0"] for n in range(len(group.rows))
    ]
