"""The flags of the optimizer and of low-rank adapters.

Knows nothing of torch. Called by `grpo_options.py`.
"""

from __future__ import annotations

import argparse

from shmbridge.consumers.learner.config.option_types import (
    above_zero,
    finite,
    not_negative,
    positive,
    rate,
    share,
)
from shmbridge.consumers.learner.model.schedule import LINEAR, SCHEDULES


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Adds the groups "optimizer" and "adapters"."""
    group = parser.add_argument_group("optimizer")
    group.add_argument(
        "--lr", type=rate, metavar="X", default=1e-6, help="peak learning rate of AdamW [1e-6]"
    )
    group.add_argument("--warmup", type=not_negative, metavar="N", default=10, help="warm-up steps [10]")
    group.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default=LINEAR,
        help="of the learning rate after the warm-up: in a line to 0, or one of transformers' [linear]",
    )
    group.add_argument(
        "--schedule-option",
        action="append",
        type=_named_number,
        default=[],
        metavar="NAME=X",
        help="keyword of that schedule in transformers, such as min_lr_rate=0.1 for cosine_with_min_lr; may "
        "be repeated",
    )
    group.add_argument(
        "--accumulate",
        type=positive,
        metavar="N",
        default=1,
        help="batches of --groups groups per step: the gradient is that of all their groups, and all are "
        "held until the step is done [1]",
    )
    group.add_argument(
        "--weight-decay", type=rate, metavar="X", default=0.0, help="decoupled weight decay [0]"
    )
    group.add_argument(
        "--max-grad-norm", type=above_zero, metavar="X", default=1.0, help="gradients are clipped to it [1]"
    )
    group.add_argument(
        "--param-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the parameters; under bfloat16 the optimizer keeps float32 masters, and adapters stay "
        "float32 [float32]",
    )
    _add_adapters(parser.add_argument_group("adapters (LoRA, by peft)"))


def _add_adapters(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lora-rank",
        type=positive,
        metavar="N",
        help="train adapters of this rank only; weights are published merged [no adapters]",
    )
    group.add_argument(
        "--lora-alpha",
        type=above_zero,
        metavar="X",
        help="adapters count by this over their rank [twice the rank]",
    )
    group.add_argument(
        "--lora-dropout", type=share, metavar="X", default=0.0, help="in front of adapters [0]"
    )
    group.add_argument(
        "--lora-targets",
        type=lambda text: tuple(text.split(",")),
        metavar="NAME,...",
        default=("all-linear",),
        help="ends of the names of modules that get one, such as q_proj,v_proj [every linear layer but the "
        "head]",
    )


def _named_number(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    try:
        if name and equals:
            return name, finite(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not such as min_lr_rate=0.1")
