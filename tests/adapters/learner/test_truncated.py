"""Answers that did not end by themselves: trained, masked, or dropped with their scores."""

from __future__ import annotations

import numpy as np
import pytest

from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.schema import FINISH_REASONS

ROWS = [[1, 2, 3]] * 5
SCORES = [1.0, 0.0, 0.5, 0.25, 0.75]
STOP, LENGTH, ABORT = (FINISH_REASONS.index(name) for name in ("stop", "length", "abort"))
REASONS = [STOP, LENGTH, None, ABORT, 77]  # 77 has no name


def made(packed_batch, truncated, **columns):
    rows, metrics = prepare(
        packed_batch(ROWS, scores=SCORES, **columns), 1.0, Credit("dr_grpo"), truncated=truncated
    )
    return rows.trained.reshape(5, 3)[:, 1], rows.advantages.reshape(5, 3)[:, 1], metrics


@pytest.mark.parametrize(
    ("truncated", "of"), [("keep", [0, 1, 2, 3, 4]), ("mask", [0, 1, 2, 3, 4]), ("drop", [0, 2, 4])]
)
def test_a_truncated_answer_is_kept_masked_or_dropped(packed_batch, truncated, of):
    trained, advantages, metrics = made(packed_batch, truncated, finish_reasons=REASONS)
    kept = [True] * 5 if truncated == "keep" else [True, False, True, False, True]
    assert trained.tolist() == kept
    expected = np.where(kept, np.array(SCORES) - np.mean([SCORES[row] for row in of]), 0.0)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    said = {
        name: metrics[name]
        for name in (
            "trajectories_truncated",
            "trajectories_without_finish_reason",
            "tokens_masked_truncated",
        )
    }
    assert list(said.values()) == [2, 2, 0 if truncated == "keep" else 4]


@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
def test_rows_that_do_not_say_how_they_ended_are_kept(packed_batch, truncated):
    trained, _, metrics = made(packed_batch, truncated)
    assert trained.all()
    assert (metrics["trajectories_truncated"], metrics["trajectories_without_finish_reason"]) == (0, 5)


def test_stale_and_truncated_tokens_are_counted_once(packed_batch):
    batch = packed_batch(
        ROWS,
        scores=SCORES,
        finish_reasons=REASONS,
        token_versions=[[9, 9, 9], [9, 0, 9], *[[9, 9, 9]] * 3],
        version=9,
    )
    _, metrics = prepare(batch, 1.0, policy_version=9, max_token_staleness=1, truncated="mask")
    assert (
        metrics["tokens_masked_stale"],
        metrics["tokens_masked_truncated"],
        metrics["trained_tokens"],
    ) == (1, 3, 6)


@pytest.mark.parametrize(
    "options", [{"truncated": "mask"}, {"truncated": "drop"}, {"policy_version": 9, "max_token_staleness": 1}]
)
def test_answers_that_the_learner_masks_keep_their_length(packed_batch, options):
    rows, masks = [[1] * 10, [2] * 4], [[0] + [1] * 9, [0] + [1] * 3]
    versions = [[9] + [0] * 9, [9] * 4]
    batch = packed_batch(
        rows,
        masks=masks,
        scores=[0.0, 1.0],
        finish_reasons=[LENGTH, STOP],
        token_versions=versions,
        version=9,
    )
    made, metrics = prepare(batch, 1.0, **options)
    assert metrics["trained_tokens"] == made.trained_count == 3
    assert metrics["atropos/avg_response_length"] == 6.0
    assert metrics["atropos/empty_response_count"] == 0
