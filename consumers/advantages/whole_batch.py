"""Advantages scaled by the trained tokens of the whole batch, on one rank or over all.

Pure numpy; the caller supplies the sum over ranks.

Letters: N tokens of this rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

Reduce = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]

# Two float32 that differ do so by more than 1e-8 of their size; the mean of equal ones is off by some 1e-15.
_NOISE = 1e-12


def alone(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns its argument: the sum over all ranks if there is one rank. Never blocks."""
    return sums


def batch_normalised(
    advantages: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    *,
    reduce: Reduce = alone,
    centre: bool = True,
    eps: float = 1e-8,
    ddof: Literal[0, 1] = 0,
) -> npt.NDArray[np.float32]:
    """Returns (advantage - mean) / (std + eps), over the trained tokens of all ranks.

    Blocks as long as `reduce` does.

    Mean 0 and deviation 1 over the tokens of the mask, however many each rank has; all other tokens get 0 and
    are not counted. Equal advantages become exactly 0, as does a single one: without differences there is
    nothing to learn (with centre=False they are divided by their size plus eps instead). Every rank must call
    this, also one without trained tokens: `reduce` is called twice, with two numbers and then with one.

    Of token rewards summed to-go this is REINFORCE++, of `group_advantages(scale="none")` spread over tokens
    its variant with a baseline. Of (B,) values with a mask of rows it is the same over rows.

    Args:
        advantages: float32 (N,), dimensionless.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.
        reduce: returns the sum of a float64 array over all ranks; by default there is one rank.
        centre: whether to subtract the mean; else the advantages are divided by their root mean square, signs
            kept.
        eps: added to the deviation, dimensionless.
        ddof: 0 for the deviation of the population, 1 for that of a sample, as verl has it.

    Returns:
        float32 (N,), a new array, dimensionless.

    Raises:
        ValueError: the arrays disagree in length.

    Source: REINFORCE++, arXiv 2501.03262 (advantage normalisation over the global batch).
    """
    values = np.asarray(advantages, dtype=np.float64)
    trained = np.asarray(loss_mask) != 0
    if values.shape != trained.shape:
        raise ValueError(
            f"advantages have shape {values.shape}, loss_mask {trained.shape}: one of each per token"
        )
    counted = values[trained]
    count, total = reduce(np.array([counted.size, counted.sum()]))
    mean = float(total / max(count, 1.0)) if centre else 0.0
    # In a second pass, because the mean of squares minus the square of the mean loses precision for large
    # means.
    (squares,) = reduce(np.array([np.square(counted - mean).sum()]))
    deviation = float(np.sqrt(squares / max(count - ddof, 1.0)))
    if deviation <= _NOISE * abs(mean):
        return np.zeros(values.shape, np.float32)
    return np.where(trained, (values - mean) / (deviation + eps), 0.0).astype(np.float32)
