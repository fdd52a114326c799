"""DAPO's soft overlong punishment: a penalty on the scores of completions that are too long. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def overlong_penalty(lengths: npt.ArrayLike, max_length: int, buffer: int) -> npt.NDArray[np.float32]:
    """Returns what to add to each completion's reward: 0, then down to -1 over the last `buffer` tokens.

    Never blocks.

    Args:
        lengths: int (B,), tokens of each completion.
        max_length: tokens; longer completions, possible under another limit, get -1 too.
        buffer: tokens before `max_length` over which the penalty grows; 0: a step at `max_length`.

    Returns:
        float32 (B,), in [-1, 0], in units of the reward of a correct completion.

    Raises:
        ValueError: buffer is negative or larger than max_length.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer {buffer} is not within 0 and max_length {max_length}")
    over = (np.asarray(lengths, np.int64) - (max_length - buffer)).astype(np.float32)
    penalty: npt.NDArray[np.float32] = -np.clip(
        over / np.float32(max(buffer, 1)), np.float32(0.0), np.float32(1.0)
    )
    return penalty


def answer_lengths(cu_seqlens: npt.ArrayLike, trained: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Returns int64 (B,): tokens from a row's first trained one to its end, 0 without any. Never blocks.

    Args:
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        trained: bool (N,), the trained tokens.
    """
    starts, at = np.asarray(cu_seqlens, np.int64), np.append(np.flatnonzero(trained), np.iinfo(np.int64).max)
    first = at[np.searchsorted(at, starts[:-1])]  # at or after the row's start, possibly in a later row
    lengths: npt.NDArray[np.int64] = starts[1:] - np.minimum(first, starts[1:])
    return lengths
