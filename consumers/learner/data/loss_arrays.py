"""The arrays that the loss needs of a batch.

Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmbridge.schema import is_logprob

NO_LOGPROB = np.nan  # the mark of "not recorded"


def known_count(logprobs: npt.NDArray[np.float32], where: npt.NDArray[np.bool_]) -> int:
    """Returns how many log-probabilities at these places were recorded. Never blocks."""
    return int(np.count_nonzero(where & is_logprob(logprobs)))


@dataclass(frozen=True)
class TrainingRows:
    """The arrays that the loss needs, row after row without padding; value i belongs to token i."""

    tokens: npt.NDArray[np.int32]  # (N,)
    cu_seqlens: npt.NDArray[np.int32]  # (B+1,) where each row begins, then N
    trained: npt.NDArray[np.bool_]  # (N,) False for the first token of a row: nothing predicts it
    advantages: npt.NDArray[np.float32]  # (N,) dimensionless
    sampled_logprobs: npt.NDArray[np.float32]  # (N,) nats; NO_LOGPROB if not recorded
    temperature: npt.NDArray[np.float32]  # (B,) > 0
    # (N,) as sampled_logprobs; None if not requested
    reference_logprobs: npt.NDArray[np.float32] | None = None
    # (N,) token_versions equals the version about to be trained; None if unknown
    fresh: npt.NDArray[np.bool_] | None = None
    # (N,) `trained` before the learner's own masking; None: not kept
    answers: npt.NDArray[np.bool_] | None = None

    @property
    def trained_count(self) -> int:
        """The number of trained tokens in this rank's batch."""
        return int(np.count_nonzero(self.trained))

    @property
    def answer_count(self) -> int:
        """The number of rows with a trained token in this rank's batch."""
        before = np.concatenate([[0], np.cumsum(self.trained)])  # cumulative count of trained tokens
        return int(np.count_nonzero(np.diff(before[self.cu_seqlens])))
