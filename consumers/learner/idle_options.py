"""Flags that do nothing without another one, which is not there: refused, since whoever gives one wants what it says.

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


class IdleOption(Exception):
    """A flag would do nothing; the message says which one, and what it needs."""


def refuse_idle(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Look at a parsed command line. Never blocks. Raises IdleOption; a flag that says its own default is not seen."""
    for flag, (needs, without) in _NEEDS.items():
        name = _name(flag)
        if getattr(options, name) != parser.get_default(name) and getattr(options, _name(needs.split()[0])) in without:
            raise IdleOption(f"{flag} does nothing without {needs} -> give that too, or leave {flag} out")
    if options.engine and options.no_weights:
        raise IdleOption("--engine takes weights, and --no-weights writes none -> leave one of them out")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
