"""The flags of a learner on several devices.

Knows nothing of torch. Called by `grpo_options.py`.
"""

from __future__ import annotations

import argparse

from shmbridge.consumers.learner.config.option_types import seconds


def add_rank_options(root: argparse.ArgumentParser) -> None:
    """Adds the group of flags that torchrun's ranks read."""
    group = root.add_argument_group("several devices (started by torchrun: one process for each)")
    group.add_argument(
        "--parallel",
        choices=("ddp", "fsdp2"),
        default="ddp",
        help="ddp: every rank has the whole model; fsdp2: a part of each tensor [ddp]",
    )
    group.add_argument(
        "--process-group-timeout",
        type=seconds,
        metavar="SECONDS",
        default=600.0,
        help="how long ranks wait for a silent one before they end [600]",
    )
