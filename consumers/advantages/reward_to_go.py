"""Discounted reward-to-go in many rows at once. Pure numpy over flat arrays.

`process_rewards.py` uses it for steps, `token_rewards.py` for tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def to_go(values: npt.ArrayLike, lengths: npt.ArrayLike, discount: float = 1.0) -> npt.NDArray[np.float64]:
    """Returns for every value the sum of itself and the later ones of its row, each discounted by distance.

    Never blocks.

    out[t] = sum over j >= t in the same row of discount**(j - t) * values[j], with 0**0 = 1. Summed in pairs
    of pairs, log2(longest row) passes over the array: it never divides by a power of the discount, so that
    rows of any length keep their precision.

    Args:
        values: float64 (S,), row after row, in any unit.
        lengths: int (B,), values of each row, 0 and more, S in all.
        discount: 0 .. 1 per place.

    Returns:
        float64 (S,), in the unit of the values, a new array.

    Raises:
        ValueError: the lengths do not add up to S, or the discount is not in 0 .. 1.
    """
    sums = np.array(values, dtype=np.float64)
    counts = np.asarray(lengths, dtype=np.int64)
    if sums.ndim != 1 or counts.ndim != 1 or counts.sum() != sums.size or counts.min(initial=0) < 0:
        raise ValueError(
            f"values have shape {sums.shape}, and their {counts.size} rows have {counts.sum()} in all"
        )
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"a discount of {discount} is not in 0 .. 1")
    # number of values from here to the end of the row
    to_come = np.repeat(np.cumsum(counts), counts) - np.arange(sums.size)
    reach = 1
    while reach < counts.max(initial=0):
        # sums[t] covers `reach` values now; those that begin `reach` further on cover the next ones.
        sums[:-reach] += np.where(to_come[:-reach] > reach, discount**reach * sums[reach:], 0.0)
        reach *= 2
    return sums
