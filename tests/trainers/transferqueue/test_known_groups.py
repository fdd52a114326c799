"""Groups with every trap go through a bridge into TransferQueue, and another process reads them back."""

from __future__ import annotations

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq

import shmbridge
from shmbridge.testing.known_groups import known_groups


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
    groups, bridge, found = known_groups(), f"{queue}-lanes", {}
    with shmbridge.Producer(bridge) as producer, shmbridge.Consumer(bridge) as consumer:
        for group in groups:
            group.put(producer)
        for number, batch in zip(
            range(len(groups)), consumer.batches(groups=1, layout="packed"), strict=False
        ):
            group = next(each for each in groups if each.group_id == batch.meta[0].group_id)
            keys, fields, tags = example.verl_fields(batch)
            partition = f"known{number}"
            tq.kv_batch_put(keys, partition, fields, tags)
            batch.release()
            found[group.name] = (group, *ray.get(peer.run.remote(read, keys, partition)))
            tq.kv_clear(keys, partition)
    return found


GROUPS = [group.name for group in known_groups()]


def differences(group, rows, shift: int = 0) -> list[str]:
    """Fields that differ anywhere from what the environment put; `shift` moves the expected by so many."""
    wrong = set()
    for number, row in enumerate(group.rows):
        response = slice(row.prompt_length, None)
        wanted = {
            "input_ids": row.tokens,
            "prompts": row.tokens[: row.prompt_length],
            "responses": row.tokens[response],
            "response_mask": row.trained[response],
            "rm_scores": row.advantages[response],
            "position_ids": np.arange(len(row.tokens)),
        }
        if row.logprobs is not None:
            wanted["rollout_log_probs"] = row.logprobs[response]
        for name, values in wanted.items():
            there = rows[name][number]
            exact = values.dtype.kind != "f" or group.name != "no columns"
            equal = np.array_equal if exact else lambda a, b: np.allclose(a, b, atol=1e-6)
            if there.shape != values.shape or not equal(there, np.roll(values, shift)):
                wrong.add(name)
    return sorted(wrong)


@pytest.mark.parametrize("name", GROUPS)
def test_every_position_is_what_the_environment_put(name, arrived):
    group, rows, _ = arrived[name]
    assert differences(group, rows) == []


@pytest.mark.parametrize("name", GROUPS)
def test_shifted_by_one_it_is_not(name, arrived):
    """So the comparison above sees a shift."""
    group, rows, _ = arrived[name]
    assert {"input_ids", "responses", "response_mask", "rm_scores"} <= set(differences(group, rows, 1))


def test_columns_that_are_missing_are_missing(arrived):
    assert "rollout_log_probs" not in arrived["no columns"][1]
    assert "rollout_log_probs" in arrived["uneven"][1]


def test_a_row_of_a_prompt_only_has_an_empty_response(arrived):
    group, rows, _ = arrived["prompt only"]
    assert [len(row) == 0 for row in rows["responses"]] == [not row.trained.any() for row in group.rows]


def test_policy_versions_and_ids_arrive(arrived):
    group, rows, listed = arrived["two versions"]
    assert all(
        (each["min_global_steps"], each["max_global_steps"]) == group.versions
        for each in rows["extra_fields"]
    )
    assert all(tag["min_global_steps"] == group.versions[0] for _, tag in listed)
    assert set(rows["uid"]) == {group.group_id}
    assert [key.split("_") for key, _ in listed] == [
        [group.group_id, str(n), "0"] for n in range(len(group.rows))
    ]
