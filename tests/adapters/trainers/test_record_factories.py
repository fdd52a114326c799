"""Rows as torchtitan, prime-rl and slime take them: their fields, value by value."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import shmbridge
from shmbridge.consumers.record_factories import (
    prime_rl_micro_batch,
    prime_rl_training_sample,
    slime_sample,
    torchtitan_training_sample,
)
from shmbridge.consumers.trajectories import trajectories
from shmbridge.testing.fixtures import loss_matrix
from tests.trainers.contract import Seen, assert_contract, fully_recorded, without

FIELDS = json.loads((Path(__file__).parent / "fields.json").read_text())
KINDS = {"list[int]": int, "list[bool]": bool, "list[float]": float, "list[str]": str}


@pytest.fixture
def rows(bridge):
    """[(what was put of a row, its group, the Trajectory)], of all groups but the evaluation."""
    groups = loss_matrix()
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, "gsm8k") as producer:
        for group in groups:
            group.put(producer)
        with next(consumer.batches(groups=len(groups) - 1, timeout_s=10)) as batch:
            put = [(row, group) for group in without(groups, "evaluation") for row in group.rows]
            made = [(*each, row) for each, row in zip(put, trajectories(batch)[0], strict=True)]
    return made


def check_fields(made: dict, trainer: str, name: str) -> None:
    """Every field is one of the trainer's, of its type, and none that must be given is missing."""
    table = FIELDS[trainer][name]
    assert set(made) <= set(table), "a field the trainer does not have"
    assert {field for field, (_, needed) in table.items() if needed} <= set(made), "a field is missing"
    for field, value in made.items():
        kind = table[field][0].removesuffix(" | None")
        if value is None:
            assert table[field][0].endswith("| None"), field
        elif kind in KINDS:
            assert {type(each) for each in value} <= {KINDS[kind]}, field
        elif kind in ("int", "str"):
            assert type(value).__name__ == kind, field


def seen(made: dict, *names: str, before: int = 0) -> Seen:
    """A record as the contract compares it; `before` tokens have none of the values."""
    tokens, *values = (made[name] for name in names)
    arrays = [each if each is None else np.append(np.zeros(before), np.float32(each)) for each in values]
    return Seen(np.array(tokens), *arrays)


def test_torchtitan(rows):
    found = [torchtitan_training_sample(row) for _, _, row in rows]
    for made, (_, group, _) in zip(found, rows, strict=True):
        check_fields(made, "torchtitan", "TrainingSample")
        check_fields(made["rollout_id"], "torchtitan", "RolloutTurnID")
        if group.name != "many versions":
            assert (made["min_policy_version"], made["max_policy_version"]) == group.versions
    ids = [made["rollout_id"] for made in found]
    assert [each["rollout_id"] for each in ids] == [0, 1, 2, 3] * 9
    assert len({each["group_id"] for each in ids}) == 9
    assert {each["turn_id"] for each in ids} == {0}
    names = ("token_ids", "loss_mask", "advantage", "logprobs")
    commit = f"commit {FIELDS['torchtitan']['commit'][:8]}"
    assert_contract(
        "torchtitan RL, its record", commit, "", loss_matrix(), [seen(made, *names) for made in found]
    )


def test_prime_rl(rows):
    complete = [row for put, group, row in rows if group in fully_recorded([group])]
    found = [prime_rl_training_sample(row, temperature=0.5) for row in complete]
    for made in found:
        check_fields(made, "prime_rl", "TrainingSample")
        assert made["temperatures"] == [0.5] * len(made["token_ids"])
        assert made["env_name"] == "gsm8k"
    names = ("token_ids", "mask", "advantages", "logprobs")
    commit, groups = f"commit {FIELDS['prime_rl']['commit'][:8]}", fully_recorded(loss_matrix())
    assert_contract("prime-rl, its record", commit, "", groups, [seen(made, *names) for made in found])
    packed = prime_rl_micro_batch(complete[:3])
    check_fields(packed, "prime_rl", "MicroBatch")
    lengths = [len(row.tokens) for row in complete[:3]]
    assert packed["sequence_lengths"] == packed["seq_lens"] == lengths
    assert packed["position_ids"] == [at for length in lengths for at in range(length)]
    assert packed["advantages"] == [value for made in found[:3] for value in made["advantages"]]
    tokens = ("input_ids", "loss_mask", "advantages", "inference_logprobs", "temperatures", "env_names")
    assert {len(packed[name]) for name in tokens} == {sum(lengths)}


def test_prime_rl_refuses_what_it_could_not_train(rows):
    without = next(row for put, _, row in rows if put.logprobs is None)
    with pytest.raises(shmbridge.InvalidRecord, match=r"row 0 of group known-3-2 of environment .gsm8k"):
        prime_rl_training_sample(without)
    with pytest.raises(shmbridge.BadArgument, match="no rows"):
        prime_rl_micro_batch([])


def test_slime(rows):
    records = []
    for number, (put, group, row) in enumerate(rows):
        made = slime_sample(row, number)
        check_fields(made, "slime", "Sample")
        assert made["response_length"] == len(put.tokens) - put.prompt_length == len(made["loss_mask"])
        assert made["reward"] == put.score
        assert made["remove_sample"] == (not put.trained.any())
        versions = dict(group.fragments[0]).get("token_versions", [[4]] * 4)[row.number]
        assert made["weight_versions"] == [str(each) for each in np.unique(versions) if each >= 0]
        assert made["status"] == ("truncated" if put.finish_reason == "length" else "completed")
        names = ("tokens", "loss_mask", "advantages", "rollout_log_probs")
        records.append(seen(made | made["train_metadata"], *names, before=put.prompt_length))
    commit = f"commit {FIELDS['slime']['commit'][:8]}"
    assert_contract("slime, its record", commit, "", loss_matrix(), records)


def test_temperature_finish_and_row_index_are_the_rows_own(bridge, producer, consumer):
    producer.put(
        {
            "tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]], "prompt_length": [1], "score": [1.0],
            "inference_logprobs": [[0, -1, -2]], "ref_logprobs": [[0, -3, -4]], "temperature": [0.25],
            "finish_reason": [1], "row_index": [2],
        }
    )  # fmt: skip
    with next(consumer.batches(groups=1, timeout_s=10)) as batch:
        ((row,), _) = trajectories(batch)
        made = prime_rl_training_sample(row)
        assert (made["temperatures"], made["ref_logprobs"]) == ([0.25] * 3, [0.0, -3.0, -4.0])
        assert prime_rl_micro_batch([row])["ref_logprobs"] == [0.0, -3.0, -4.0]
        assert slime_sample(row, 7, 3)["status"] == "truncated"
        assert slime_sample(row, 7, 3)["rollout_id"] == 3
        assert slime_sample(row, 7)["weight_versions"] == []
        assert torchtitan_training_sample(row)["rollout_id"]["turn_id"] == 2


def test_torchtitan_gets_nan_only_for_tokens_whose_log_probability_is_unknown(bridge, producer, consumer):
    """1.0 is Atropos' mark for none; the tokens beside it keep what the sampler recorded."""
    rows = {"tokens": [[1, 2, 3, 4]], "loss_mask": [[0, 1, 1, 1]]}
    producer.put(rows | {"inference_logprobs": [[1.0, -0.5, 1.0, -0.25]]})
    with next(consumer.batches(groups=1, timeout_s=10)) as batch:
        ((row,), _) = trajectories(batch)
        assert row.logprobs is None
        first, second, unknown, last = torchtitan_training_sample(row)["logprobs"]
    assert (first, second, last) == (0.0, -0.5, -0.25)
    assert math.isnan(unknown)


def test_prime_rl_gets_the_temperature_that_atropos_fields_say(bridge, producer, consumer):
    """Without a column: of the row, else of its group; a greedy one counts as the default."""
    own = [{"temperature": 0.5}, {}, {"temperature": 0.0}, {"temperature": "hot"}]
    producer.put(
        {
            "tokens": [[1, 2]] * 4, "loss_mask": [[0, 1]] * 4, "inference_logprobs": [[1.0, -1.0]] * 4,
            "overrides": own, "group_overrides": {"temperature": 0.75},
        }
    )  # fmt: skip
    with next(consumer.batches(groups=1, timeout_s=10)) as batch:
        rows, _ = trajectories(batch)
        heats = [prime_rl_training_sample(row, temperature=2.0)["temperatures"] for row in rows]
    assert heats == [[0.5] * 2, [0.75] * 2, [2.0] * 2, [0.75] * 2]
