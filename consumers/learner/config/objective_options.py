"""The flags that say what the learner optimises: the loss, its corrections, and where advantages come from.

Knows nothing of torch. Called by `grpo_options.py`; `objective.py` reads them and refuses what does not go
together.
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
    zero_or_above,
)


def add_objective(parser: argparse.ArgumentParser) -> None:
    """Adds the groups "objective" and "advantages"."""
    group = parser.add_argument_group("objective")
    group.add_argument(
        "--loss",
        choices=("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"),
        default="dapo",
        help="what a token's loss is, and how tokens are added up: docs/reference/losses.md [dapo]",
    )
    group.add_argument(
        "--clip-low",
        type=zero_or_above,
        metavar="X",
        help="ratio clipped below 1 - this [the loss's own; dapo: 0.2]",
    )
    group.add_argument(
        "--clip-high",
        type=zero_or_above,
        metavar="X",
        help="ratio clipped above 1 + this [the loss's own; dapo: 0.28]",
    )
    group.add_argument(
        "--clip-dual",
        type=zero_or_above,
        metavar="X",
        default=3.0,
        help="of the clipped losses: a negative advantage stops pushing where the ratio is above this; 0: "
        "nowhere [3]",
    )
    group.add_argument(
        "--mask-ratio",
        type=zero_or_above,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="do not train tokens whose ratio policy / sampler is outside [all are trained]",
    )
    group.add_argument(
        "--mask-ratio-sequence",
        type=zero_or_above,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="do not train answers whose ratio, the geometric mean over their trained tokens, is outside "
        "[all are trained]",
    )
    group.add_argument(
        "--mismatch-warn",
        type=zero_or_above,
        metavar="NATS",
        default=0.05,
        help="warn when log-probabilities of sampler and policy are further apart, in the mean over tokens "
        "whose token_versions is the version being trained; 0: never [0.05]",
    )
    group.add_argument(
        "--max-answer-tokens", type=positive, metavar="N", help="what dr_grpo divides by [--max-token-len]"
    )
    group.add_argument(
        "--tis-cap",
        type=above_zero,
        metavar="X",
        help="truncated importance sampling: weigh by min(policy / sampler, this) instead of a clipped ratio "
        "[off]",
    )
    group.add_argument(
        "--tis-level", choices=("token", "sequence"), default="token", help="what has one such weight [token]"
    )
    group.add_argument(
        "--max-token-staleness",
        type=not_negative,
        metavar="VERSIONS",
        help="do not train tokens sampled more policy versions ago [the ratio corrects for any]",
    )
    group.add_argument(
        "--truncated",
        choices=("keep", "mask", "drop"),
        default="keep",
        help="answers whose finish_reason is not stop: train them; do not; or do not, and leave their scores "
        "out of their groups [keep]",
    )
    group.add_argument(
        "--kl-coef",
        type=rate,
        metavar="X",
        default=0.0,
        help="weight of the divergence from the reference [0]",
    )
    group.add_argument(
        "--kl-estimator",
        choices=("k1", "k2", "k3"),
        default="k3",
        help="of that divergence, against ref_logprobs of the record or else the model as it began [k3]",
    )
    group.add_argument(
        "--entropy", type=finite, metavar="X", default=0.0, help="weight of the entropy bonus, constant [0]"
    )
    group.add_argument(
        "--temperature",
        type=above_zero,
        metavar="X",
        default=1.0,
        help="sampling temperature where the record does not say; recorded log-probabilities are taken to be "
        "those of the tempered distribution [1.0]",
    )
    group.add_argument(
        "--train-whole-rows",
        action="store_true",
        help="train all tokens of trajectories with neither a mask nor prompt_length, the prompt too [they "
        "train nothing]",
    )
    group.add_argument(
        "--ignore-images",
        action="store_true",
        help="train trajectories with images as text alone, instead of ending with an error",
    )
    group.add_argument(
        "--leave-out-unknown-tokens",
        action="store_true",
        help="train nothing of trajectories with a token id that the model does not have, instead of ending "
        "with an error",
    )
    group.add_argument(
        "--sft-normalization",
        choices=("none", "batch", "global"),
        help="for --loss sft: advantages normalised over the trained tokens of this rank's batch, or of all "
        "ranks [batch]",
    )
    _advantages(parser.add_argument_group("advantages"))


def _advantages(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--advantages",
        choices=("grpo", "dr_grpo", "rloo", "batch"),
        default="grpo",
        help="from the scores: over the group with its deviation, without it, against the group's others, or "
        "less the group's mean and then over all trained tokens of all ranks [grpo]",
    )
    group.add_argument(
        "--no-use-advantages",
        dest="use_advantages",
        action="store_false",
        help="take all advantages from the scores, also where environments wrote their own",
    )
    group.add_argument(
        "--no-fallback-to-grpo",
        dest="fallback_to_grpo",
        action="store_false",
        help="end with an error at a group without advantages of its own, instead of taking them from its "
        "scores",
    )
    group.add_argument(
        "--clip-advantages",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="least and greatest advantage [no bounds]",
    )
    group.add_argument(
        "--process-rewards",
        choices=("off", "to_go", "step"),
        default="off",
        help="step_rewards: a token gets those of its own step and all later ones, or of its own step alone "
        "[off]",
    )
    group.add_argument(
        "--process-over",
        choices=("group", "place"),
        default="group",
        help="normalise all step rewards of a group together, or the first of each row, the second of each "
        "row, ... [group]",
    )
    group.add_argument(
        "--process-discount", type=share, metavar="X", default=1.0, help="per step, for to_go [1]"
    )
    group.add_argument(
        "--process-weight",
        type=share,
        metavar="X",
        default=0.5,
        help="of the step rewards, the rest is the outcome's [0.5]",
    )
    group.add_argument(
        "--token-rewards",
        choices=("off", "group", "batch"),
        default="off",
        help="token_rewards: summed to-go, then normalised over the group's tokens, or over those of all "
        "ranks [off]",
    )
    group.add_argument("--token-discount", type=share, metavar="X", default=1.0, help="per trained token [1]")
    group.add_argument(
        "--token-weight",
        type=share,
        metavar="X",
        default=0.5,
        help="of the token rewards, the rest is what came before [0.5]",
    )
    group.add_argument(
        "--overlong-length",
        type=positive,
        metavar="N",
        help="answers of this many tokens lose 1 of their score; takes --overlong-buffer [no limit]",
    )
    group.add_argument(
        "--overlong-buffer",
        type=not_negative,
        metavar="N",
        default=0,
        help="tokens before that, over which the loss grows",
    )
