"""Several batches of the bridge in one optimizer step: the gradient is that of one batch with all their
groups.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmbridge.consumers.learner.train.grpo_update import Learner, Objective
from shmbridge.consumers.learner.train.objective import SHARES

PARTS = (  # of unequal sizes, so that a mean of means would be wrong
    ([[3, 4, 5, 6], [3, 4, 7, 8]], [1.0, 0.0], [[0, 0, 1, 1], [0, 0, 1, 1]]),
    (
        [[9, 1, 2, 5, 6, 7], [9, 1, 3, 3, 3, 3], [9, 1, 3]],
        [0.0, 1.0, 3.0],
        [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 1]],
    ),
    ([[2, 2, 4], [2, 2, 6]], [0.5, 0.0], [[0, 0, 1], [0, 0, 0]]),
)


def gradients(own):
    return {name: parameter.grad.clone() for name, parameter in own.model.named_parameters()}


@pytest.mark.parametrize(
    "objective",
    [
        Objective(entropy=0.1, micro_tokens=8),
        Objective(loss="grpo", micro_tokens=8),
        Objective(loss="dr_grpo", max_tokens=7),
        Objective(loss="gspo"),
    ],
    ids=lambda goal: goal.loss,
)
def test_parts_leave_the_gradient_and_the_numbers_of_the_whole(tiny_model, packed_batch, objective):
    split, whole = (Learner(tiny_model(1), objective, lambda step: 1e-2) for _ in range(2))
    for number, (rows, scores, masks) in enumerate(PARTS):
        logprobs = [[-0.5] * len(row) for row in rows]
        found = split.accumulate(
            packed_batch(rows, scores=scores, masks=masks, logprobs=logprobs), first=number == 0
        )

    rows, scores, masks = ([value for part in PARTS for value in part[each]] for each in range(3))
    groups = np.repeat([0, 1, 2], [2, 3, 2]).tolist()
    logprobs = [[-0.5] * len(row) for row in rows]
    expected = whole.accumulate(
        packed_batch(rows, scores=scores, masks=masks, logprobs=logprobs, groups=groups)
    )

    for name in SHARES:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    of_whole = gradients(whole)
    for name, gradient in gradients(split).items():
        torch.testing.assert_close(gradient, of_whole[name], rtol=1e-4, atol=1e-7, msg=name)


def test_a_first_batch_begins_again(tiny_model, packed_batch):
    own, other = (Learner(tiny_model(1), Objective(), lambda step: 1e-2) for _ in range(2))
    batches = [packed_batch(rows, scores=scores, masks=masks) for rows, scores, masks in PARTS]
    own.accumulate(batches[0])
    own.accumulate(batches[1])
    other.accumulate(batches[1])
    of_other = gradients(other)
    assert all(torch.equal(gradient, of_other[name]) for name, gradient in gradients(own).items())
