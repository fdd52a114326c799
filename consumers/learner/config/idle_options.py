"""Refuses flags that do nothing: those that need a flag which is not given, and those that have no effect
beside one that is.

Knows the command line's names; nothing of torch. Called by `grpo.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

# flag -> the flag that it needs, and the values of that one that will not do
_NEEDS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "--tis-level": ("--tis-cap", (None,)),
    "--clip-dual": ("--loss grpo, dr_grpo, dapo or gspo", ("cispo", "sft")),
    "--kl-estimator": ("--kl-coef", (0.0,)),
    "--max-answer-tokens": ("--loss dr_grpo", ("grpo", "dapo", "gspo", "cispo", "sft")),
    "--process-over": ("--process-rewards", ("off",)),
    "--process-weight": ("--process-rewards", ("off",)),
    "--process-discount": ("--process-rewards to_go", ("off", "step")),
    "--token-weight": ("--token-rewards", ("off",)),
    "--token-discount": ("--token-rewards", ("off",)),
    "--lora-alpha": ("--lora-rank", (None,)),
    "--lora-dropout": ("--lora-rank", (None,)),
    "--lora-targets": ("--lora-rank", (None,)),
    "--eval-every": ("--eval-hook", (None,)),
    "--stop-patience": ("--stop-when", (None,)),
    "--stop-stall": ("--stop-no-better", (None,)),
    "--wandb-name": ("--wandb", (False,)),
    "--pause": ("--engine", ([],)),
    "--engine-patience": ("--engine", ([],)),
}


# flag -> the flag beside which it does nothing, and why
_BESIDE: Mapping[str, tuple[str, str]] = {
    "--clip-dual": ("--tis-cap", "one update per batch leaves the ratio at 1, which no bound holds"),
    "--no-fallback-to-grpo": (
        "--no-use-advantages",
        "all advantages are made of the scores then, which is the fallback",
    ),
}


class IdleOption(Exception):
    """A flag would do nothing; the message says which one, and why."""


def refuse_idle(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Looks at a parsed command line. Never blocks.

    Raises IdleOption; a flag that says its own default is not seen.
    """
    for flag, (needs, without) in _NEEDS.items():
        if _given(flag, options, parser) and getattr(options, _name(needs.split()[0])) in without:
            raise IdleOption(f"{flag} does nothing without {needs} -> give that too, or leave {flag} out")
    for flag, (other, why) in _BESIDE.items():
        if _given(flag, options, parser) and _given(other, options, parser):
            raise IdleOption(f"{flag} does nothing beside {other}: {why} -> leave one of them out")
    if options.engine and options.no_weights:
        raise IdleOption("--engine takes weights, and --no-weights writes none -> leave one of them out")


def _given(flag: str, options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    return bool(getattr(options, _name(flag)) != parser.get_default(_name(flag)))


def _name(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")
