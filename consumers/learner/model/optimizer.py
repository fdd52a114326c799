"""The learner's optimizer, AdamW with float32 master copies where needed, and its learning rate per step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shmbridge.consumers.learner import Refusal
from shmbridge.consumers.learner.config.options import Schedule

BETAS = (0.9, 0.95)
Rate = Callable[[int], float]  # 0-based step -> learning rate
LINEAR = "linear"


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


SCHEDULES: tuple[str, ...] = get_args(Schedule)


class BadSchedule(Refusal, ValueError):
    """The schedule's options are invalid; the message says why."""


def learning_rate_at(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Returns the rate of a 0-based step: up to the peak over the warm-up, then down to 0 at `steps`."""
    rising = (step + 1) / max(warmup, 1)
    falling = (steps - step) / max(steps - warmup, 1)
    return peak * max(0.0, min(1.0, rising, falling))


def rate_schedule(
    name: str, *, peak: float, warmup: int, steps: int, options: Mapping[str, float] | None = None
) -> Rate:
    """Returns the learning rate as a function of the 0-based step. Does not block.

    "linear" is `learning_rate_at`; its first step has a rate above 0. The others are those of
    `transformers.get_scheduler`, whose warm-up begins with a step at rate 0.

    Args:
        name: one of `SCHEDULES`.
        peak: the rate that the schedule multiplies.
        warmup: optimizer steps.
        steps: optimizer steps of the whole run.
        options: keyword arguments of that schedule in transformers, such as min_lr, min_lr_rate, num_cycles,
            power, lr_end, num_decay_steps; whole numbers become int.

    Raises:
        BadSchedule: the schedule does not exist, or does not take these options.
    """
    options = options or {}
    if name == LINEAR:
        if options:
            raise BadSchedule(f"the linear schedule takes no options, and {', '.join(options)} were given")
        return functools.partial(learning_rate_at, peak=peak, warmup=warmup, steps=steps)
    if name not in SCHEDULES:
        raise BadSchedule(f"{name} is none of {', '.join(SCHEDULES)}")
    return _of_transformers(
        name, peak, warmup, steps, {key: _number(value) for key, value in options.items()}
    )


def _of_transformers(name: str, peak: float, warmup: int, steps: int, options: dict[str, float]) -> Rate:
    import torch
    from transformers import get_scheduler

    nothing = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    try:
        scheduler = get_scheduler(name, nothing, warmup, steps, options or None)
        if name in ("constant", "constant_with_warmup", "inverse_sqrt") and options:
            raise TypeError(f"{', '.join(options)} given, and it takes none")
        factor: Rate = scheduler.lr_lambdas[0]
        factor(0)
    except (TypeError, ValueError) as error:
        raise BadSchedule(f"the schedule {name} with options {options}: {error}") from error
    return lambda step: peak * float(factor(step))


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value
