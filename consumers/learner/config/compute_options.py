"""The learner's options on where and how it computes: device, precision, batches' layout, chunks, and the way
to the device.

Knows nothing of torch. Called by `grpo_options.py`.
"""

from __future__ import annotations

import argparse

from shmbridge.consumers.learner.config.option_types import not_negative, positive


def add_compute(group: argparse._ArgumentGroup) -> None:
    """Adds the options to an argument group."""
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[cuda if any]")
    group.add_argument(
        "--threads", type=not_negative, metavar="N", default=0, help="CPU threads; 0: torch's choice [0]"
    )
    group.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the forward pass and of the published weights; see --param-dtype [float32]",
    )
    group.add_argument(
        "--micro-tokens",
        type=positive,
        metavar="N",
        default=8192,
        help="tokens of one forward pass, with padding [8192]",
    )
    group.add_argument(
        "--batch-layout",
        choices=("padded", "packed", "auto"),
        default="auto",
        help="rows in rectangles, or one after the other without padding; auto packs for every model that is "
        "seen to keep packed rows apart without a mask [auto]",
    )
    group.add_argument(
        "--chunk-tokens",
        type=not_negative,
        metavar="N",
        default=None,
        help="trained tokens whose logits are there at a time; 0: all of a forward pass [256 MiB of logits, "
        "all if they take less than 1 GiB]",
    )
    group.add_argument(
        "--host-copy",
        choices=("batch", "direct", "auto"),
        default="auto",
        help="tokens go to the device by way of a batch in host memory, or straight from the ring, on a "
        "stream of their own; auto is batch, until direct has been measured on a GPU [auto]",
    )
    group.add_argument(
        "--prefetch", type=positive, metavar="N", default=1, help="batches formed, or copied, ahead [1]"
    )
    group.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third slower")
    group.add_argument("--no-weights", action="store_true", help="publish versions but no weights")
