"""Step and token rewards as token advantages: summed to-go, normalised, mixed with the outcome's.

Pure numpy over the flat arrays of one packed batch. `Steps.of` takes the columns `step_rewards` and
`step_ends` as a packed batch has them: `Steps.of(batch.step_rewards.values, batch.step_rewards.lengths,
batch.step_ends.values, batch.step_ends.lengths, batch.cu_seqlens)`.

Letters: B rows (trajectories), S steps of all rows, N tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from shmbridge.consumers.advantages.from_scores import Reduce, alone, batch_normalised, group_advantages

FloatArray = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


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


@dataclass(frozen=True)
class Steps:
    """The checked steps of a batch, row after row: in each row every step has an end, or none has.

    A step's tokens are those from the end of the step before it, or from the row's first token, to its own
    end. In a row without step ends each reward applies to the whole row.
    """

    rewards: npt.NDArray[np.float64]  # (S,) in the judge's unit
    ends: Ints  # (S,) tokens, exclusive, within the row; the row's length where the row has no ends
    counts: Ints  # (B,) steps of each row
    placed: npt.NDArray[np.bool_]  # (B,) rows whose steps have ends
    starts: Ints  # (B+1,) where each row begins in the packed batch, then N

    @classmethod
    def of(
        cls,
        rewards: npt.ArrayLike,
        reward_counts: npt.ArrayLike,
        ends: npt.ArrayLike | None,
        end_counts: npt.ArrayLike | None,
        cu_seqlens: npt.ArrayLike,
    ) -> Steps:
        """Returns the steps of two ragged columns. Never blocks.

        Args:
            rewards: float32 (S,), reward of each step, row after row.
            reward_counts: int (B,), steps of each row; 0 where it has none.
            ends: int32 (S or fewer,), exclusive token index of each step's end within its row; None if no row
                has any.
            end_counts: int (B,), ends of each row: as many as rewards, or 0 where the row's steps have no
                ends.
            cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.

        Raises:
            ValueError: the columns disagree, or an end lies outside its row or does not rise; it names the
                row.
        """
        reward = np.asarray(rewards, dtype=np.float64)
        counts, end, ended, starts = _as_integers(reward_counts, ends, end_counts, cu_seqlens)
        for name, values, per_row in (("step_rewards", reward, counts), ("step_ends", end, ended)):
            if per_row.shape != (starts.size - 1,):
                raise ValueError(
                    f"the counts of {name} have shape {per_row.shape}, and cu_seqlens speaks of "
                    f"{starts.size - 1} rows"
                )
            if values.shape != (per_row.sum(),):
                raise ValueError(f"{name} has shape {values.shape}, and its rows have {per_row.sum()} in all")
        unlike = np.flatnonzero((ended != counts) & (ended != 0))
        if unlike.size:
            row = int(unlike[0])
            raise ValueError(
                f"row {row} has {counts[row]} step_rewards and {ended[row]} step_ends -> one end per "
                "reward, or none at all"
            )

        placed = ended > 0
        row_of_step = np.repeat(np.arange(counts.size), counts)
        every_end = (starts[1:] - starts[:-1])[row_of_step]
        every_end[placed[row_of_step]] = end
        steps = cls(reward, every_end, counts, placed, starts)
        _check_ends(steps)
        return steps

    @classmethod
    def sound(
        cls,
        rewards: npt.ArrayLike,
        reward_counts: npt.ArrayLike,
        ends: npt.ArrayLike | None,
        end_counts: npt.ArrayLike | None,
        cu_seqlens: npt.ArrayLike,
    ) -> tuple[Steps, npt.NDArray[np.bool_]]:
        """Returns the steps of consistent rows, and bool (B,): the others, which get none. Never blocks.

        For a learner that must not stop for one bad row. Arguments, and errors of whole columns, as `of`.
        """
        counts, end, ended, starts = _as_integers(reward_counts, ends, end_counts, cu_seqlens)
        rows = np.repeat(np.arange(ended.size), ended)
        outside = (end <= _ends_before(end, rows)) | (end > (starts[1:] - starts[:-1])[rows])
        odd = (ended != counts) & (ended != 0)
        odd[rows[outside]] = True
        reward = np.asarray(rewards)[~np.repeat(odd, counts)]
        return cls.of(reward, np.where(odd, 0, counts), end[~odd[rows]], np.where(odd, 0, ended), starts), odd

    @property
    def lengths(self) -> Ints:
        """int64 (B,): the tokens of each row."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def rows(self) -> Ints:
        """int64 (S,): the row of each step."""
        return np.repeat(np.arange(self.counts.size), self.counts)


def _as_integers(
    counts: npt.ArrayLike, ends: npt.ArrayLike | None, end_counts: npt.ArrayLike | None, starts: npt.ArrayLike
) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns the integer columns of steps; absent ends are none in every row."""
    count = np.asarray(counts, dtype=np.int64)
    end = np.asarray(() if ends is None else ends, dtype=np.int64)
    ended = np.zeros_like(count) if end_counts is None else np.asarray(end_counts, dtype=np.int64)
    return count, end, ended, np.asarray(starts, dtype=np.int64)


def _ends_before(ends: Ints, rows: Ints) -> Ints:
    """Returns int64 (S,): the end of the step before, 0 for a row's first."""
    before = np.zeros(ends.size, np.int64)
    before[1:] = np.where(rows[1:] == rows[:-1], ends[:-1], 0)
    return before


def _check_ends(steps: Steps) -> None:
    ends, rows, lengths = steps.ends, steps.rows, steps.lengths
    before = _ends_before(ends, rows)
    wrong = np.flatnonzero(steps.placed[rows] & ((ends <= before) | (ends > lengths[rows])))
    if wrong.size:
        at = int(wrong[0])
        row, step = int(rows[at]), at - int(np.searchsorted(rows, rows[at]))
        where = f"step {step} of row {row} ends at token {ends[at]}"
        if ends[at] > lengths[row]:
            raise ValueError(
                f"{where}, and the row has {lengths[row]} tokens -> ends are exclusive, counted from the "
                "row's first token"
            )
        raise ValueError(
            f"{where}, where the step before it ends at {before[at]} -> ends rise, and the first is at "
            "least 1"
        )


def process_advantages(
    steps: Steps,
    group_index: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    *,
    usable: npt.ArrayLike | None = None,
    reach: Literal["to_go", "step"] = "to_go",
    over: Literal["group", "place"] = "group",
    discount: float = 1.0,
    scale: Literal["std", "none"] = "std",
    eps: float = 1e-4,
    floor: float = 1e-4,
    ddof: Literal[0, 1] = 0,
) -> FloatArray:
    """Returns token advantages computed from step rewards. Never blocks.

    First step rewards are normalised as `group_advantages` does, guards included: equal rewards give exactly
    0, and so does a single one.

    What is normalised together, `over`:

    - "group": all step rewards of all rows of a group.
    - "place": those of the first steps of a group's rows, those of their second steps, and so on. Where a
      step that most rows fail is followed by one that most pass, neither is judged by the other's difficulty.

    What a token gets then, `reach`:

    - "to_go": the sum of its own step's and all later normalised rewards of its row, those of the k-th step
      from its own times discount**k.
    - "step": its own step's normalised reward alone.

    Tokens after the last end get 0: no reward comes after them. Untrained tokens get 0, but a step without
    trained tokens counts like any other in the group and for the tokens before it. In a row whose steps have
    no ends every token gets the sum of the row's normalised rewards under both, undiscounted: no token is
    known to come after a reward. Rows without steps get 0; `mixed` gives them the outcome.

    Args:
        steps: of the batch.
        group_index: int (B,), ordinal of each row's group.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.
        usable: bool (B,), rows whose steps count; the others get 0 and stand in no mean; None means all.
        reach: which rewards a token gets.
        over: which rewards are compared.
        discount: 0 .. 1 per step, for "to_go".
        scale, eps, floor, ddof: as in `group_advantages`.

    Returns:
        float32 (N,), dimensionless; with scale="none" in the unit of the rewards.

    Raises:
        ValueError: the arrays disagree in length, or an option is outside its range.

    Source: GRPO, arXiv 2402.03300 (process supervision): "to_go" with discount 1, scale="std".
    """
    group, trained = np.asarray(group_index, dtype=np.int64), np.asarray(loss_mask) != 0
    counts = np.ones(group.shape, bool) if usable is None else np.asarray(usable, dtype=bool)
    if not group.shape == counts.shape == steps.counts.shape:
        raise ValueError(
            f"steps are of {steps.counts.size} rows, group_index has shape {group.shape}, usable "
            f"{counts.shape}"
        )
    if trained.shape != (steps.starts[-1],):
        raise ValueError(f"loss_mask has shape {trained.shape}, and cu_seqlens ends at {steps.starts[-1]}")
    if reach not in ("to_go", "step"):
        raise ValueError(f'reach is {reach!r}: "to_go" or "step"')
    if over not in ("group", "place"):
        raise ValueError(f'over is {over!r}: "group" or "place"')
    rows = steps.rows
    compared = group[rows]
    if over == "place":
        place = np.arange(rows.size) - np.searchsorted(rows, rows)
        compared = np.unique(np.stack([compared, place]), axis=1, return_inverse=True)[1].reshape(-1)
    normalised = group_advantages(
        steps.rewards, compared, usable=counts[rows], scale=scale, eps=eps, floor=floor, ddof=ddof
    ).astype(np.float64)
    worth = to_go(normalised, steps.counts, discount) if reach == "to_go" else normalised
    whole_row = np.bincount(rows, weights=normalised, minlength=steps.counts.size)
    per_token = np.repeat(np.where(steps.placed, 0.0, whole_row), steps.lengths) + _on_their_tokens(
        worth, steps
    )
    return np.where(trained, per_token, 0.0).astype(np.float32)


def _on_their_tokens(worth: npt.NDArray[np.float64], steps: Steps) -> npt.NDArray[np.float64]:
    """Returns float64 (N,): the value of each token's step; 0 after the last end, and where no end is."""
    rows = steps.rows
    has_place = steps.placed[rows]
    ends = (steps.starts[rows] + steps.ends)[has_place]  # rising through the whole batch
    values = np.append(worth[has_place], 0.0)
    row_of_end = np.append(rows[has_place], -1)
    # the first end after the token
    following = np.searchsorted(ends, np.arange(steps.starts[-1]), side="right")
    own_row = row_of_end[following] == np.repeat(np.arange(steps.counts.size), steps.lengths)
    return np.where(own_row, values[following], 0.0)


def mixed(
    outcome: npt.ArrayLike,
    process: npt.ArrayLike,
    has_process: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    *,
    weight: float,
) -> FloatArray:
    """Returns (1 - weight) * outcome + weight * process in rows with process rewards, else the outcome.

    Never blocks.

    A token of such a row that no step reward reaches (after the last end) keeps (1 - weight) of the outcome.
    A token that has 0 in both, as untrained ones do, keeps 0.

    Args:
        outcome: float32 (N,), advantages from the scores, dimensionless.
        process: float32 (N,), from `process_advantages` or `token_reward_advantages`.
        has_process: bool (B,), rows that have such rewards: `steps.counts > 0`.
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        weight: 0 .. 1, dimensionless; 1 is process supervision alone.

    Returns:
        float32 (N,), a new array, dimensionless.

    Raises:
        ValueError: the arrays disagree in length, or the weight is not in 0 .. 1.
    """
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"a weight of {weight} is not in 0 .. 1")
    of_scores, of_steps = np.asarray(outcome, dtype=np.float64), np.asarray(process, dtype=np.float64)
    starts = np.asarray(cu_seqlens, dtype=np.int64)
    lengths = starts[1:] - starts[:-1]
    has = np.asarray(has_process, dtype=bool)
    if has.shape != lengths.shape or not of_scores.shape == of_steps.shape == (lengths.sum(),):
        raise ValueError(
            f"outcome has shape {of_scores.shape}, process {of_steps.shape}, has_process {has.shape}, "
            f"and cu_seqlens speaks of {lengths.size} rows with {lengths.sum()} tokens"
        )
    blend = (1.0 - weight) * of_scores + weight * of_steps
    return np.where(np.repeat(has, lengths), blend, of_scores).astype(np.float32)


def rewards_to_go(
    token_rewards: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    *,
    discount: float = 1.0,
) -> FloatArray:
    """Returns for every trained token its own reward and the later ones of its row, discounted. Never blocks.

    The discount is per trained token: an untrained span between two trained tokens costs nothing. A reward on
    an untrained token is ignored, as in verl; place a turn's reward on the last token that the policy wrote.

    Args:
        token_rewards: float32 (N,), in the environment's unit.
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.
        discount: 0 .. 1 per trained token.

    Returns:
        float32 (N,), in the environment's unit; 0 where untrained.

    Raises:
        ValueError: the arrays disagree in length, or the discount is not in 0 .. 1.

    Source: REINFORCE++, arXiv 2501.03262, without its KL term.
    """
    rewards, trained, lengths = _checked_tokens(token_rewards, cu_seqlens, loss_mask)
    row_of_token = np.repeat(np.arange(lengths.size), lengths)
    returns = np.zeros(rewards.size, np.float32)
    returns[trained] = to_go(
        rewards[trained], np.bincount(row_of_token[trained], minlength=lengths.size), discount
    )
    return returns


def token_reward_advantages(
    token_rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    *,
    has_rewards: npt.ArrayLike | None = None,
    discount: float = 1.0,
    over: Literal["group", "batch"] = "group",
    reduce: Reduce | None = None,
) -> FloatArray:
    """Returns `rewards_to_go`, normalised over the trained tokens of each group or of the batch.

    Blocks as long as `reduce` does.

    Rows without token rewards get 0 and are in no mean; `mixed` gives them the outcome.

    Args:
        token_rewards, cu_seqlens, loss_mask, discount: as in `rewards_to_go`; rows without rewards have 0.
        group_index: int (B,), ordinal of each row's group.
        has_rewards: bool (B,), rows that have token rewards; None means all.
        over: "group" as `group_advantages`, a token for a row; "batch" as `batch_normalised` (then it is
            REINFORCE++).
        reduce: for over="batch", as there; by default there is one rank.

    Returns:
        float32 (N,), dimensionless; 0 where untrained.

    Raises:
        ValueError: the arrays disagree in length, or an option is outside its range.
    """
    _, trained, lengths = _checked_tokens(token_rewards, cu_seqlens, loss_mask)
    group = np.asarray(group_index, dtype=np.int64)
    has = np.ones(lengths.shape, bool) if has_rewards is None else np.asarray(has_rewards, dtype=bool)
    if not group.shape == has.shape == lengths.shape:
        raise ValueError(
            f"group_index has shape {group.shape}, has_rewards {has.shape}, and cu_seqlens speaks of "
            f"{lengths.size} rows"
        )
    if over not in ("group", "batch"):
        raise ValueError(f'over is {over!r}: "group" or "batch"')
    counted = trained & np.repeat(has, lengths)
    returns = rewards_to_go(token_rewards, cu_seqlens, trained, discount=discount)
    if over == "group":
        return group_advantages(returns, np.repeat(group, lengths), usable=counted)
    return batch_normalised(returns, counted, reduce=reduce or alone)


def _checked_tokens(
    token_rewards: npt.ArrayLike, cu_seqlens: npt.ArrayLike, loss_mask: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    rewards, trained = np.asarray(token_rewards, dtype=np.float64), np.asarray(loss_mask) != 0
    starts = np.asarray(cu_seqlens, dtype=np.int64)
    lengths = starts[1:] - starts[:-1]
    if not rewards.shape == trained.shape == (lengths.sum(),):
        raise ValueError(
            f"token_rewards have shape {rewards.shape}, loss_mask {trained.shape}, and cu_seqlens ends at "
            f"{lengths.sum()}"
        )
    return rewards, trained, lengths
