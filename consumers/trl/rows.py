"""The rows of a batch as TRL's sync trainer takes them: prompt and completion of each, and (B, T) arrays.

Imports numpy only. Letters: B rows, L tokens of one row, T tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shmbridge import Batch
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.trajectories import Credit, Trajectory, columns_ignored, trajectories

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

# read here, or by the credit assignment
READ = frozenset((
    "tokens", "loss_mask", "masks", "prompt_length", "advantages", "advantages_mask", "overrides",
    "inference_logprobs", "generation_params", "group_overrides", "temperature",
))  # fmt: skip
# arguments of reward functions that TRL fills itself
_TAKEN = frozenset((
    "prompt", "prompts", "completion", "completions", "completion_ids", "environment", "environments",
    "trainer_state", "log_extra", "log_metric", "env_mask", "prompt_ids", "logprobs", "image", "images",
))  # fmt: skip


class UnevenGroups(ValueError):
    """A batch from the bridge does not have as many rows as the trainer wants; it comes again."""


@dataclass(frozen=True)
class Row:
    """One row, cut in two; the arrays are views, value i belongs to token i."""

    prompt: Integers  # at least one token
    completion: Integers  # at least one token
    trained: Integers  # as long as the completion, 0 or 1
    advantages: Floats  # as long as the completion
    logprobs: Floats | None  # as long as the completion; None: the sampler recorded none
    masked: bool  # nothing in it is trained


@dataclass(frozen=True)
class Rows:
    """The rows of one generation batch of one process."""

    rows: list[Row]
    columns: dict[str, list[Any]]  # columns that nothing here reads: for reward functions; None where absent
    ignored: dict[str, int]  # column -> rows that have it, of columns whose name TRL gives to something else
    counts: dict[str, float] = field(default_factory=dict)

    def padded(self, name: str, width: int) -> Floats:
        """Returns float32 (B, width) of "advantages" or "logprobs", 0 where a row has none. Never blocks.

        A new array; padded on the right, as TRL pads completions.
        """
        made = np.zeros((len(self.rows), width), np.float32)
        for to, row in zip(made, self.rows, strict=True):
            if (values := getattr(row, name)) is not None:
                to[: len(values)] = values
        return made

    @property
    def unscored(self) -> npt.NDArray[np.bool_]:
        """Bool (B,): rows with trained tokens, and without log-probabilities of the sampler."""
        return np.array([row.logprobs is None and not row.masked for row in self.rows], np.bool_)

    @property
    def scored(self) -> npt.NDArray[np.bool_]:
        """Bool (B,): rows with trained tokens, and their log-probabilities of the sampler."""
        return np.array([row.logprobs is not None and not row.masked for row in self.rows], np.bool_)


def rows_of(
    batch: Batch,
    want: int,
    *,
    pad_id: int,
    credit: Credit,
    temperature: float = 1.0,
    fill: bool = False,
    whole_rows: bool = False,
    mask_truncated: bool = False,
    unfit: Container[int] = (),
) -> Rows:
    """Returns the rows of a packed batch. Never blocks, releases nothing.

    The completion begins where the response does. Where a row has no response, or no prompt, the cut moves by
    one token, because TRL takes neither an empty completion nor a batch of empty prompts; masks stay as they
    are. Rows of fewer than two tokens, which can train nothing, become rows of two masked padding tokens, and
    so do unfit rows.

    Args:
        batch: a packed batch.
        want: rows that the trainer wants.
        pad_id: the tokenizer's padding token.
        credit: how advantages are computed where a record has none.
        temperature: the trainer's; rows sampled at another one are counted.
        fill: adds fully masked rows where the batch has fewer.
        whole_rows, mask_truncated: as in `trajectories`.
        unfit: rows that cannot be trained, by their numbers in the batch.

    Raises:
        UnevenGroups: more rows than wanted, or fewer without `fill`.
        NoAdvantages: as in `trajectories`.
    """
    found, metrics = trajectories(batch, credit, whole_rows=whole_rows, mask_truncated=mask_truncated)
    missing = want - len(found)
    if missing < 0 or (missing and not fill):
        raise UnevenGroups(_uneven(batch, want))
    wide = batch.tokens.astype(np.int64)
    starts = batch.cu_seqlens
    rows = [
        _row(each, wide[starts[each.row] : starts[each.row + 1]])
        if len(each.tokens) > 1 and each.row not in unfit
        else _masked_row(pad_id)
        for each in found
    ]
    unused = columns_ignored(batch, READ)
    columns: dict[str, list[Any]] = {
        name: [each.value(name) for each in found] + [None] * missing for name in unused if name not in _TAKEN
    }
    facts = BatchFacts(batch, temperature)
    other = ~np.isclose(facts.temperatures, temperature) | facts.odd_temperature
    counts = {
        "rows": float(len(found)),
        "tokens": float(batch.token_count),
        "rows_filled": float(missing),
        "rows_left_out": float(sum(each.row in unfit for each in found)),
        "rows_too_short": float(sum(len(each.tokens) < 2 for each in found)),
        "rows_untrained": float(sum(not each.trained.any() for each in found)),
        "rows_without_logprobs": float(sum(each.logprobs is None and each.trained.any() for each in found)),
        "rows_other_temperature": float(other.sum()),
        "rows_cut_sampling": float(facts.cut_sampling.sum()),
        "rows_truncated": metrics.get("trajectories_truncated", 0.0),
        "rows_without_finish_reason": metrics.get("trajectories_without_finish_reason", 0.0),
        "groups_fallback": metrics["groups_fallback"],
        "rows_no_signal": metrics["trajectories_no_signal"],
    }
    rows += [_masked_row(pad_id)] * missing
    ignored = {name: count for name, count in unused.items() if name in _TAKEN}
    return Rows(rows, columns, ignored, counts)


def _row(each: Trajectory, tokens: Integers) -> Row:
    cut = min(max(each.prompt_length, 1), len(tokens) - 1)
    logprobs = None if each.logprobs is None else each.logprobs[cut:]
    trained = each.trained[cut:].astype(np.int64)
    return Row(tokens[:cut], tokens[cut:], trained, each.advantages[cut:], logprobs, not trained.any())


def _masked_row(pad_id: int) -> Row:
    token, nothing = np.array([pad_id]), np.zeros(1, np.float32)
    return Row(token, token, np.zeros(1, np.int64), nothing, nothing, True)


def _uneven(batch: Batch, want: int) -> str:
    sizes = np.bincount(batch.group_index)
    odd = int(np.abs(sizes - want / len(sizes)).argmax())
    meta = batch.meta[int((batch.group_index == odd).argmax())]
    return (
        f"a batch of {len(sizes)} groups has {len(batch)} rows and the trainer wants {want}; group "
        f"{meta.group_id!r} of environment {meta.env_name!r} has {sizes[odd]} -> groups of num_generations "
        'rows, or uneven="fill" (too few rows) or uneven="skip" of shm_rollout_func'
    )
