"""token_versions say under which policy each token was sampled: the record's own versions follow from them,
or agree with them.
"""

import numpy as np
import pyarrow as pa
import pytest
import torch

import shmbridge
from shmbridge.schema import trajectory_schema

TOKENS = [[1, 2, 3], [4, 5]]
VERSIONS = [[-1, 7, 8], [-1, 6]]


def flat(rows) -> np.ndarray:
    return np.array([value for row in rows for value in row], np.int32)


FORMS = {
    "lists": VERSIONS,
    "arrays": [np.array(row, np.int32) for row in VERSIONS],
    "int64": [np.array(row, np.int64) for row in VERSIONS],
    "tensors": [torch.tensor(row, dtype=torch.int32) for row in VERSIONS],
    "flat": (flat(VERSIONS), [3, 2]),
    "tuple of lists": tuple(VERSIONS),
}


def span(record: shmbridge.Record) -> tuple[int, int]:
    return record.meta.min_policy_version, record.meta.max_policy_version


@pytest.mark.parametrize("form", FORMS)
def test_tokens_decide_without_a_version(producer, consumer, form) -> None:
    consumer.publish_policy_version(9)
    producer.put({"tokens": TOKENS, "token_versions": FORMS[form]})
    record = consumer.get(1)
    assert span(record) == (6, 8)
    assert record["token_versions"].values.tolist() == [-1, 7, 8, -1, 6]


def test_tokens_decide_also_from_arrow_in_a_claim_and_behind_a_full_lane(producer, consumer) -> None:
    consumer.publish_policy_version(9)
    schema = trajectory_schema()
    columns = {"tokens": TOKENS, "token_versions": VERSIONS}
    arrays = [pa.array(rows, schema.field(name).type) for name, rows in columns.items()]
    producer.put(pa.record_batch(arrays, names=list(columns)))
    with producer.claim(2, {"tokens": [3, 2], "token_versions": [3, 2]}) as slot:
        slot["tokens"][:], slot["token_versions"][:] = flat(TOKENS), flat(VERSIONS)
    producer.put(columns, split="eval")
    assert [span(record) for record in consumer.poll()] == [(6, 8)] * 3


async def test_tokens_decide_also_in_put_async(producer, consumer) -> None:
    await producer.put_async({"tokens": TOKENS, "token_versions": VERSIONS})
    assert span(consumer.get(1)) == (6, 8)


def test_tokens_that_say_nothing_leave_the_current_version(producer, consumer) -> None:
    consumer.publish_policy_version(9)
    for versions in ([[-1] * 3, [-1] * 2], None):
        producer.put({"tokens": TOKENS, "token_versions": versions})
    assert [span(record) for record in consumer.poll()] == [(9, 9)] * 2


def test_a_single_version_is_when_generation_began_and_tokens_may_be_newer(producer, consumer) -> None:
    """Weights change under a rollout: it began under 5, and ended under 8."""
    producer.put({"tokens": TOKENS, "token_versions": VERSIONS}, policy_version=5)
    producer.put({"tokens": TOKENS, "token_versions": VERSIONS}, policy_version=(6, 8))
    producer.put({"tokens": TOKENS, "token_versions": VERSIONS}, policy_version=(2, 30))
    assert [span(record) for record in consumer.poll()] == [(5, 8), (6, 8), (2, 30)]


@pytest.mark.parametrize(("version", "place"), [(7, (1, 1)), ((7, 8), (1, 1)), ((6, 7), (0, 2))])
def test_tokens_that_contradict_what_was_said_are_refused_and_counted(
    producer, consumer, version, place
) -> None:
    with pytest.raises(shmbridge.InvalidRecord, match="policy_version 7") as caught:
        producer.put({"tokens": TOKENS, "token_versions": VERSIONS}, policy_version=version)
    assert (caught.value.column, caught.value.row, caught.value.position) == ("token_versions", *place)
    with (
        pytest.raises(shmbridge.InvalidRecord, match="token_versions"),
        producer.claim(2, {"tokens": [3, 2], "token_versions": [3, 2]}, policy_version=version) as slot,
    ):
        slot["tokens"][:], slot["token_versions"][:] = flat(TOKENS), flat(VERSIONS)
    assert producer.stats()["dropped_total{invalid}"] == 2
    assert producer.stats()["records_total"] == 0
    producer.put({"tokens": TOKENS, "token_versions": VERSIONS})
    assert span(consumer.get(1)) == (6, 8)


def test_staleness_is_cut_by_the_oldest_token(producer, consumer) -> None:
    consumer.publish_policy_version(9)
    producer.put({"tokens": TOKENS, "token_versions": VERSIONS})
    producer.put({"tokens": TOKENS, "token_versions": [[-1, 7, 9], [-1, 8]]})
    batch = next(consumer.batches(groups=1, max_staleness=2, prefetch=0, timeout_s=5))
    assert batch.meta[0].min_policy_version == 7
    assert consumer.stats()["discarded_total{stale}"] == 1


def test_atropos_masks_and_versions_in_one_group(producer, consumer) -> None:
    """Rare masks are planned a second time, with their versions."""
    producer.put(
        {
            "tokens": TOKENS,
            "masks": [[-100, 2, 99], [-100, 5]],
            "scores": [1.0, 0.0],
            "token_versions": VERSIONS,
        }
    )
    assert span(consumer.get(1)) == (6, 8)
