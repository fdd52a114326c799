"""The rows of a batch as TRL's async trainer takes them: full sequences, each with one advantage.

TRL's `RolloutSample` has a scalar where the bridge has one advantage per token. A row whose trained tokens
have K different advantages becomes K samples of the same tokens, each with the mask of the tokens that have
one of them: the loss then has the same terms as with one advantage per token, each once, and TRL's packing
forwards shared tokens once. Imports numpy only. Letter: L tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from shmbridge.consumers.trajectories import Trajectory

PerToken = Literal["split", "refuse", "mean"]


class PerTokenAdvantages(ValueError):
    """A row has several advantages, and TRL's async trainer takes one; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample; the arrays are views of the batch's, but for masks of rows that were split."""

    tokens: npt.NDArray[np.int32]  # (L,)
    mask: npt.NDArray[np.uint8]  # (L,)
    logprobs: npt.NDArray[np.float32]  # (L,) nats
    advantage: float


def different_advantages(row: Trajectory) -> npt.NDArray[np.float32]:
    """Returns the different advantages of a row's trained tokens, rising; empty if none is trained."""
    return np.unique(row.advantages[row.trained])


def samples_of(
    row: Trajectory, values: npt.NDArray[np.float32], per_token: PerToken, most_parts: int
) -> list[Sample]:
    """Returns the samples of a row; empty if nothing in it is trained. Never blocks.

    Args:
        row: with log-probabilities.
        values: its different advantages.
        per_token: what becomes of a row with several advantages: "split" (exact), "refuse", or "mean" (of its
            trained tokens, for all of them).
        most_parts: samples that a row may be split into.

    Raises:
        NoLogprobs: the row has none. PerTokenAdvantages: refused, or more parts than allowed.
    """
    if not len(values):
        return []
    logprobs, whole = row.known_logprobs("unscored='skip'"), row.trained.view(np.uint8)
    if len(values) == 1:
        return [Sample(row.tokens, whole, logprobs, float(values[0]))]
    if per_token == "mean":
        return [Sample(row.tokens, whole, logprobs, float(row.advantages[row.trained].mean()))]
    if per_token == "refuse" or len(values) > most_parts:
        raise PerTokenAdvantages(
            f"{row.named} has {len(values)} different advantages from {values[0]:g} to {values[-1]:g}, and a "
            f"sample of TRL has one -> per_token='split' with most_parts={len(values)}, or per_token='mean'"
        )
    return [
        Sample(row.tokens, (row.trained & (row.advantages == value)).view(np.uint8), logprobs, float(value))
        for value in values
    ]
