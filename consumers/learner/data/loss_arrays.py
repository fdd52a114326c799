"""The arrays that the loss needs of a batch.

Made by `training_rows.py`; read by the loss, by micro-batches and by what describes a batch in numbers.

Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A log-probability is never positive, so a positive one says "none was recorded": Atropos writes 1.0 where no
# token was sampled, and rows whose record carried no log-probabilities get the same mark here.
NO_LOGPROB = 1.0


def known_count(logprobs: npt.NDArray[np.float32], where: npt.NDArray[np.bool_]) -> int:
    """Returns how many recorded log-probabilities, of those at the places, are one: not positive, and finite.

    Never blocks.
    """
    return int(np.count_nonzero(where & (logprobs <= 0.0) & (logprobs > -np.inf)))


@dataclass(frozen=True)
class TrainingRows:
    """What the loss needs of a batch, row after row without padding; value i belongs to token i."""

    tokens: npt.NDArray[np.int32]  # (N,)
    cu_seqlens: npt.NDArray[np.int32]  # (B+1,) where each row begins, then N
    trained: npt.NDArray[np.bool_]  # (N,) never true for the first token of a row: nothing predicts it
    advantages: npt.NDArray[np.float32]  # (N,) dimensionless
    sampled_logprobs: npt.NDArray[np.float32]  # (N,) nats; NO_LOGPROB where none was recorded
    temperature: npt.NDArray[np.float32]  # (B,) > 0
    # (N,) as sampled_logprobs; None if nobody asked for them
    reference_logprobs: npt.NDArray[np.float32] | None = None
    # (N,) whose own version is the one about to be trained; None if that is not known
    fresh: npt.NDArray[np.bool_] | None = None
    # (N,) `trained` before any masking of the learner's own; None: not kept
    answers: npt.NDArray[np.bool_] | None = None

    @property
    def trained_count(self) -> int:
        """Trained tokens of this rank's batch."""
        return int(np.count_nonzero(self.trained))

    @property
    def answer_count(self) -> int:
        """Rows of this rank's batch with a trained token."""
        before = np.concatenate([[0], np.cumsum(self.trained)])  # trained tokens in front of each
        return int(np.count_nonzero(np.diff(before[self.cu_seqlens])))
