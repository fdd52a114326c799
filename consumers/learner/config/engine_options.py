"""The learner's options on inference engines that it brings to its weights: which, how, how often.

Knows the words for a pause, and nothing of torch and of single engines. Called by `grpo_options.py`.
"""

from __future__ import annotations

import argparse

from shmbridge.consumers.engines.engine import PAUSES
from shmbridge.consumers.learner.config.option_types import positive, seconds


def add_engines(root: argparse.ArgumentParser) -> None:
    """Adds the group "inference engines"."""
    group = root.add_argument_group(
        "inference engines (those that follow the bridge by themselves need none of this)"
    )
    group.add_argument(
        "--engine",
        type=_url,
        action="append",
        default=[],
        metavar="URL",
        help="bring this server to every version while the next batch is awaited: vLLM, SGLang, or one that "
        "follows; may be repeated",
    )
    group.add_argument(
        "--pause",
        choices=PAUSES,
        default="keep",
        help="requests in flight go on under the new weights, are waited for, or end where they are [keep]",
    )
    group.add_argument(
        "--engine-patience",
        type=seconds,
        metavar="SECONDS",
        default=600.0,
        help="the learner ends when an engine has failed so long, push after push [600]",
    )
    group.add_argument(
        "--publish-every",
        type=positive,
        metavar="N",
        default=1,
        help="optimizer steps between two versions, for engines and for those that follow; the last step "
        "makes one always [1]",
    )


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as http://127.0.0.1:8000")
    return text
