"""The flags that say who hears of each step: W&B, TensorBoard, the terminal.

Knows nothing of any of them. Called by `grpo_options.py`.
"""

from __future__ import annotations

import argparse

from shmbridge.consumers.learner.config.option_types import positive


def add_logging(parser: argparse.ArgumentParser) -> None:
    """Adds the group "logging"."""
    group = parser.add_argument_group("logging")
    group.add_argument(
        "--log-every", type=positive, metavar="N", default=1, help="steps between progress lines [1]"
    )
    group.add_argument(
        "--progress", action="store_true", help="a bar instead of lines, where standard error is a terminal"
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="log every step's metrics for TensorBoard, into tensorboard/ of the run directory",
    )
    group.add_argument(
        "--wandb",
        action="store_true",
        help="log every step's metrics to a W&B run, in the project and group of the registration",
    )
    group.add_argument("--wandb-name", default="", metavar="NAME", help="name of that run [the bridge's]")
