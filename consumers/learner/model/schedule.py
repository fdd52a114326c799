"""The learning rate as a function of the optimizer step, so that a resumed run needs only the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import get_args

from shmbridge.consumers.learner.config.options import Schedule
from shmbridge.consumers.learner.types import Refusal

Rate = Callable[[int], float]  # 0-based step -> learning rate

LINEAR = "linear"
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
