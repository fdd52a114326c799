"""The flags that say how old a group may be, and in which order groups are taken; what the consumer is told
of them.

Knows nothing of torch. Called by `grpo_options.py` and `grpo.py`. docs/explanation/staleness.md says what the
limits promise.
"""

from __future__ import annotations

import argparse
from typing import Any

from shmbridge.consumers.learner.config.option_types import not_negative


class BadLimit(Exception):
    """Flags that do not go together; the message says which."""


def add_staleness(parser: argparse.ArgumentParser) -> None:
    """Adds the group "staleness"."""
    group = parser.add_argument_group("staleness")
    group.add_argument(
        "--max-staleness",
        type=not_negative,
        metavar="VERSIONS",
        help="discard groups older than this many policy versions, which count optimizer steps [no limit, or "
        "--max-off-policy-steps]",
    )
    group.add_argument(
        "--max-off-policy-steps",
        type=not_negative,
        metavar="STEPS",
        help="let environments that ask begin no group which would be trained more steps later; takes "
        "--policy oldest [no limit]",
    )
    group.add_argument(
        "--policy",
        choices=("fair", "atropos", "oldest"),
        help="how batches are formed: fair over environments; as the Atropos server does: then a step has "
        "--groups x --group-size trajectories; or the oldest policy version first [fair, or oldest]",
    )


def consumer_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what of the flags goes to the Consumer. Never blocks. Raises BadLimit."""
    steps = options.max_off_policy_steps
    policy = options.policy or ("fair" if steps is None else "oldest")
    if steps is not None and policy != "oldest":
        raise BadLimit(
            f"--max-off-policy-steps {steps} needs the oldest groups first: leave --policy {policy} out"
        )
    _require_reachable(options)
    return {
        "policy": policy,
        "max_off_policy_steps": steps,
        "groups_per_step": None if steps is None else options.groups,
    }


def _require_reachable(options: argparse.Namespace) -> None:
    """Before a version is due, what the newest one sampled is some steps old: a limit below that would let
    nothing through, for ever.
    """
    oldest = options.publish_every - 1
    for name in ("max_staleness", "max_off_policy_steps", "max_token_staleness"):
        limit = getattr(options, name)
        if limit is not None and limit < oldest:
            flag = f"--{name.replace('_', '-')}"
            raise BadLimit(
                f"with --publish-every {options.publish_every} even the newest samples are {oldest} steps "
                f"old before the next version, and {flag} is {limit}: raise {flag} to {oldest}, or lower "
                f"--publish-every to {limit + 1}"
            )
