"""AdamW over float32 masters keeps updates that a bfloat16 parameter would lose."""

from __future__ import annotations

import pytest
import torch

from shmbridge.consumers.learner.model.optimizer import MasterAdamW, new_optimizer


def step(optimizer, parameter, rate):
    optimizer.param_groups[0]["lr"] = rate
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_float32_is_plain_adamw_and_what_needs_no_gradient_is_left_out():
    trained, frozen = (
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    )
    optimizer = new_optimizer([trained, frozen], 0.1)
    assert type(optimizer) is torch.optim.AdamW
    assert [group["params"] for group in optimizer.param_groups] == [[trained]]


def test_updates_too_small_for_bfloat16_add_up_in_the_master():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = new_optimizer([parameter], 0.0)
    assert isinstance(optimizer, MasterAdamW)
    step(optimizer, parameter, 1e-4)
    assert torch.equal(parameter, torch.ones(3, dtype=torch.bfloat16))
    for _ in range(99):
        step(optimizer, parameter, 1e-4)
    torch.testing.assert_close(
        optimizer.state[parameter]["master"], torch.full((3,), 0.99), rtol=1e-5, atol=0
    )
    assert parameter.dtype == torch.bfloat16
    assert torch.equal(parameter, torch.full((3,), 0.99, dtype=torch.bfloat16))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_masters_take_the_steps_of_adamw(decay):
    torch.manual_seed(1)
    start = torch.randn(7).bfloat16()
    rounded, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    own = MasterAdamW([rounded], lr=1e-3, weight_decay=decay)
    theirs = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, 0.95), weight_decay=decay)
    for _ in range(5):
        rounded.grad = torch.randn(7).bfloat16()
        exact.grad = rounded.grad.float()
        own.step()
        theirs.step()
    assert torch.equal(own.state[rounded]["master"], exact.detach())
    assert torch.equal(rounded, exact.detach().bfloat16())
