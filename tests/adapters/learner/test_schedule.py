"""Learning rates: the linear schedule is unchanged, the others have transformers' numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from shmbridge.consumers.learner.model.optimizer import (
    SCHEDULES,
    BadSchedule,
    learning_rate_at,
    rate_schedule,
)

OPTIONS = {
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "polynomial": {"power": 2, "lr_end": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 8},
}


def test_the_linear_schedule_is_unchanged():
    rate = rate_schedule("linear", peak=2.0, warmup=4, steps=10)
    assert [rate(step) for step in range(10)] == [
        learning_rate_at(step, peak=2.0, warmup=4, steps=10) for step in range(10)
    ]
    assert [rate(0), rate(3), rate(7)] == [0.5, 2.0, 1.0]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "linear"])
def test_other_schedules_are_those_of_transformers(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler = get_scheduler(name, optimizer, 5, 40, OPTIONS.get(name))
    rate = rate_schedule(name, peak=1e-2, warmup=5, steps=40, options=OPTIONS.get(name))
    for step in range(45):
        assert rate(step) == optimizer.param_groups[0]["lr"], step
        optimizer.step()
        scheduler.step()


def test_a_schedule_knows_its_place_from_the_step_alone():
    """A resumed run needs nothing else of it."""
    rate = rate_schedule("cosine", peak=1.0, warmup=2, steps=20)
    assert rate(11) == rate_schedule("cosine", peak=1.0, warmup=2, steps=20)(11)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("linear", {"min_lr": 1.0}, "takes no options"),
        ("nonsense", {}, "none of linear"),
        ("cosine", {"min_lr": 1.0}, "min_lr"),
        ("cosine_with_min_lr", {}, "min_lr"),
        ("constant", {"power": 1.0}, "takes none"),
    ],
)
def test_options_that_do_not_fit_are_said(name, options, says):
    with pytest.raises(BadSchedule, match=says):
        rate_schedule(name, peak=1.0, warmup=2, steps=20, options=options)
