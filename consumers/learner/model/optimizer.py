"""The learner's optimizer: AdamW on float32 parameters, or on float32 master copies of other dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

BETAS = (0.9, 0.95)


def new_optimizer(parameters: Iterable[Tensor], weight_decay: float) -> torch.optim.Optimizer:
    """Returns AdamW over the trainable parameters, at rate 0: the learner sets the rate at each step."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if all(parameter.dtype == torch.float32 for parameter in trained):
        return torch.optim.AdamW(trained, lr=0.0, betas=BETAS, weight_decay=weight_decay)
    return MasterAdamW(trained, lr=0.0, weight_decay=weight_decay)


def cast_parameters(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Casts every floating-point parameter in place, but no buffer, such as rotary frequencies."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW that steps a float32 master copy of each parameter, and rounds it into the parameter.

    Without the copy, updates below half a unit in the last place of a bfloat16 parameter (1/512 of it) are
    lost. Master and moments are float32 and part of `state`, so that training resumes exactly.

    Args:
        parameters: to train, of any floating dtype.
        lr, betas, eps, weight_decay: as AdamW's.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes one step with the gradients; `closure` must be None. Blocks for the compute."""
        if closure is not None:
            raise ValueError("MasterAdamW takes no closure")
        for group in self.param_groups:
            changed = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in changed]
            adamw(
                [state["master"] for state in states],
                [parameter.grad.float() for parameter in changed],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter, state in zip(changed, states, strict=True):
                parameter.copy_(state["master"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["master"] = parameter.detach().float()
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])
            state["step"] = torch.tensor(0.0)
        return state
