"""What the loss of the learner gets, and a loop over `BridgeDataset`, is what was put:
tests/trainers/contract.py.
"""

from __future__ import annotations

import itertools

import pytest

import shmbridge
from shmbridge.consumers import grpo
from shmbridge.consumers.dataset import BridgeDataset
from shmbridge.consumers.learner.train.grpo_update import Learner
from shmbridge.testing.fixtures import loss_matrix
from tests.trainers.contract import Seen, assert_contract, without_truncated

FIELDS = ("tokens", "trained", "advantages", "sampled_logprobs")


def rows_of(micro):
    """The rows of a micro-batch of the learner."""
    starts = [0, *itertools.accumulate(micro.row_lengths)]
    for row, length in enumerate(micro.row_lengths):
        at = (
            (row, slice(length))
            if micro.cu_seqlens is None
            else (0, slice(starts[row], starts[row] + length))
        )
        yield Seen(*(getattr(micro, name)[at].numpy() for name in FIELDS))


@pytest.fixture
def put(bridge):
    """The groups of the matrix, put by a producer that lives as long as the test."""
    groups = loss_matrix(vocabulary=28)
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for group in groups:
            group.put(producer)
        yield groups


@pytest.mark.parametrize("setting", ["--batch-layout padded", "--batch-layout packed", "--truncated mask"])
def test_the_learners_loss_gets_what_was_put(bridge, put, tiny_model, tmp_path, monkeypatch, setting):
    seen, backward = [], Learner._backward

    def seeing(learner, micro, *more):
        seen.extend(rows_of(micro))
        return backward(learner, micro, *more)

    monkeypatch.setattr(Learner, "_backward", seeing)
    tiny_model(5).save_pretrained(tmp_path / "model")
    words = f"--bridge {bridge} --model {tmp_path}/model --run-dir {tmp_path}/run --device cpu --steps 1"
    words += f" --groups 9 --group-size 4 --micro-tokens 128 {setting}"
    assert grpo.main(words.split()) == 0
    wanted = without_truncated(put) if "truncated" in setting else put
    assert_contract("the learner here", "this one", f"`{setting}`", wanted, seen)


COLUMNS = ("tokens", "loss_mask", "advantages", "inference_logprobs")


def rows_of_a_batch(batch):
    """Its rows; where `has_NAME` is false, a row lacks the column."""
    for row, ends in enumerate(itertools.pairwise(batch["cu_seqlens"].tolist())):
        yield {
            name: batch[name][slice(*ends)]
            for name in COLUMNS
            if f"has_{name}" not in batch or batch[f"has_{name}"][row]
        }


@pytest.mark.parametrize("items", ["batches", "rows"])
def test_a_loop_over_the_data_set_gets_what_was_put(bridge, put, items):
    seen = []
    with BridgeDataset(bridge, groups=9, items=items, timeout_s=10, prefetch=0) as data:
        for item in itertools.islice(data, 1 if items == "batches" else 36):
            for row in rows_of_a_batch(item) if items == "batches" else [item]:
                seen.append(Seen(*(row[name].numpy().copy() if name in row else None for name in COLUMNS)))
    assert_contract("your own loop, `BridgeDataset`", "this one", f"`items={items!r}`", put, seen)
