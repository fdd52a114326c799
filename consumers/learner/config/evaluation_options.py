"""The flags of evaluation, and of an end before the last step.

Knows nothing of torch. Called by `grpo_options.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from shmbridge.consumers.learner.config.option_types import positive
from shmbridge.consumers.learner.train.early_stop import parse_condition, parse_goal

Parsed = TypeVar("Parsed")


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Adds the groups "evaluation" and "early stop"."""
    group = parser.add_argument_group(
        "evaluation (groups that environments put for it are scored and never trained)"
    )
    group.add_argument(
        "--eval-hook",
        metavar="MODULE:FUNCTION",
        help="call function(step, model, tokenizer) -> numbers by name, which are logged as eval/<name>",
    )
    group.add_argument(
        "--eval-every", type=positive, metavar="N", default=50, help="steps between two calls [50]"
    )
    group = parser.add_argument_group("early stop (exit status 0)")
    group.add_argument(
        "--stop-when",
        type=_parsed(parse_condition),
        metavar="METRIC>=X",
        help="end once a metric is as good as this, such as reward_mean>=0.95",
    )
    group.add_argument(
        "--stop-patience",
        type=positive,
        metavar="N",
        default=1,
        help="in so many steps one after the other that say it [1]",
    )
    group.add_argument(
        "--stop-no-better",
        type=_parsed(parse_goal),
        metavar="METRIC:max|min",
        help="end once a metric has not become better for long",
    )
    group.add_argument(
        "--stop-stall", type=positive, metavar="N", default=100, help="for so many steps that say it [100]"
    )


def _parsed(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """argparse shows the words of its own exception alone."""

    def parsed(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
