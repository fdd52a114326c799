"""Micro-batches: every trained row exactly once, within the budget, every value beside its token, in both
layouts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmbridge.consumers.learner.data.microbatch import micro_batches, plan_packs
from shmbridge.consumers.learner.data.training_rows import TrainingRows

CPU = torch.device("cpu")


def training_rows(lengths, seed=0, tensors=()):
    random = np.random.default_rng(seed)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    count = int(cu_seqlens[-1])
    trained = random.random(count) < 0.6
    trained[cu_seqlens[:-1][np.asarray(lengths) > 0]] = False
    columns = {
        "tokens": np.arange(count, dtype=np.int32),  # so that each token names itself
        "trained": trained,
        "advantages": np.arange(count, dtype=np.float32) + 0.25,
        "sampled_logprobs": -np.arange(count, dtype=np.float32),
        "temperature": np.linspace(0.5, 1.5, len(lengths), dtype=np.float32),
    }
    columns |= {name: torch.from_numpy(columns[name]) for name in tensors}
    return TrainingRows(cu_seqlens=cu_seqlens, **columns)


@pytest.mark.parametrize("tensors", [(), ("tokens", "sampled_logprobs")])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 60, 137, 100_000])
def test_each_trained_token_is_there_once_with_its_own_values(layout, budget, tensors):
    lengths = [*np.random.default_rng(1).integers(1, 60, 90).tolist(), 0, 200, 3]
    rows = training_rows(lengths, tensors=tensors)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    seen, whole_rows = [], []
    for micro in micro_batches(rows, budget, CPU, layout):
        tokens = micro.tokens[micro.trained]
        assert tokens.dtype == torch.int64
        torch.testing.assert_close(micro.advantages[micro.trained], tokens + 0.25)
        torch.testing.assert_close(micro.sampled_logprobs[micro.trained], -tokens.float())
        own = row_of[tokens.numpy()]
        assert micro.trained_lengths.tolist() == [
            int((own == row).sum()) for row in dict.fromkeys(own.tolist())
        ]
        np.testing.assert_array_equal(micro.token_temperature, rows.temperature[own])
        if layout == "packed":
            assert micro.tokens.shape == micro.position_ids.shape == (1, sum(micro.row_lengths))
            ends = micro.cu_seqlens.tolist()
            assert np.diff(ends).tolist() == list(micro.row_lengths)
            starts = micro.tokens[0, ends[:-1]]
            expected = micro.tokens[0] - starts.repeat_interleave(torch.tensor(micro.row_lengths))
            torch.testing.assert_close(micro.position_ids[0], expected)
            assert len(micro.row_lengths) == 1 or ends[-1] <= budget
            whole_rows += [
                (int(start), length) for start, length in zip(starts, micro.row_lengths, strict=True)
            ]
        else:
            assert micro.tokens.shape == (len(micro.row_lengths), max(micro.row_lengths))
            assert len(micro.row_lengths) == 1 or micro.tokens.numel() <= budget
            whole_rows += [
                (int(row[0]), length) for row, length in zip(micro.tokens, micro.row_lengths, strict=True)
            ]
        seen += tokens.tolist()
    assert sorted(seen) == np.flatnonzero(rows.trained).tolist()
    trains = np.unique(row_of[rows.trained])
    assert sorted(whole_rows) == [(int(rows.cu_seqlens[row]), lengths[row]) for row in trains]


def test_packs_are_full():
    lengths = np.random.default_rng(2).integers(1, 500, 400)
    parts = plan_packs(lengths, 2048)
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))
    sums = [int(lengths[part].sum()) for part in parts]
    assert sums == sorted(sums, reverse=True)
    assert max(sums) <= 2048
    assert len(parts) <= int(np.ceil(lengths.sum() / 2048)) + 1
    assert all(np.all(np.diff(lengths[part]) <= 0) for part in parts)  # one length side by side
    assert [part.tolist() for part in plan_packs([3, 500, 4], 128)] == [[1], [2, 0]]
    assert plan_packs([], 10) == []
