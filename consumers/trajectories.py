"""The rows of a batch as trainers take them: one `Trajectory` each, with its mask and its advantages.

The adapters of trainers and the record factories begin here; each pads, shifts and slices for itself. Knows
no trainer, and needs numpy only.

Letters: B rows, L tokens of one row, R tokens of its response.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shmbridge import Batch, InvalidRecord
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.credit import Credit, credited, require_advantages
from shmbridge.record import RecordMeta
from shmbridge.schema import FINISH_REASONS, STANDARD, recorded_logprobs

__all__ = [
    "Credit",
    "NoLogprobs",
    "Trajectory",
    "UnfitRow",
    "columns_ignored",
    "lags",
    "trajectories",
    "unfit_row",
    "unfit_rows",
]

_DEFAULT = Credit()


class UnfitRow(InvalidRecord):
    """A row cannot be trained; the message names its environment, its group and why."""


class NoLogprobs(InvalidRecord):
    """A loss compares with the sampler, and a row lacks the log-probability of a trained token."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One row of a batch; every array is a view of the batch's arrays, value i belongs to token i."""

    batch: Batch
    row: int  # in the batch
    number: int  # in its group, from 0
    tokens: npt.NDArray[np.int32]  # (L,)
    prompt_length: int  # tokens before the response; L if it has none
    trained: npt.NDArray[np.bool_]  # (L,) never in the prompt
    advantages: npt.NDArray[np.float32]  # (L,) dimensionless, 0 where nothing is trained
    logprobs: npt.NDArray[np.float32] | None  # (L,) nats, 0 where nothing is trained; None: not all recorded
    own_advantages: bool  # the environment wrote the advantages; they are not made of scores

    @property
    def meta(self) -> RecordMeta:
        """Origin, group, versions and times of the row's record. Valid after release, too."""
        return self.batch.meta[self.row]

    @property
    def response(self) -> slice:
        """Where the response is among the row's tokens; empty in a row of a prompt only."""
        return slice(self.prompt_length, len(self.tokens))

    @property
    def score(self) -> float | None:
        """The outcome reward, in the environment's unit; None if there is none."""
        return None if (score := self.value("score")) is None else float(score)

    @property
    def instance_id(self) -> str:
        """The task of the group: column `instance_id`, or else the group's id."""
        return self.value("instance_id") or self.meta.group_id

    @property
    def repetition_id(self) -> int:
        """The number of the rollout of that task: column `repetition_id`, or else its place in the group."""
        return self.number if (there := self.value("repetition_id")) is None else int(there)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: one of "stop", "length", "abort" and "error"; None if nobody said."""
        code = self.value("finish_reason")
        return FINISH_REASONS[code] if code is not None and code < len(FINISH_REASONS) else None

    @property
    def named(self) -> str:
        """The row in the words of an error: its number, group and environment."""
        return f"row {self.number} of group {self.meta.group_id} of environment {self.meta.env_name!r}"

    @property
    def origin(self) -> dict[str, Any]:
        """What names the row in a trainer's logs: environment, record, group, task and repetition."""
        meta = self.meta
        names = ("env_name", "producer_id", "sequence", "group_id")
        task = {"instance_id": self.instance_id, "repetition_id": self.repetition_id}
        return {name: getattr(meta, name) for name in names} | task

    def known_logprobs(self, action: str) -> npt.NDArray[np.float32]:
        """Returns float32 (L,), nats. Raises NoLogprobs, with what to do instead of recording them."""
        if self.logprobs is None:
            raise NoLogprobs(
                f"{self.named} has no log-probability for every trained token",
                hint=f"have the environment record inference_logprobs, or {action}",
                column="inference_logprobs",
                row=self.number,
            )
        return self.logprobs

    def value(self, name: str) -> Any:
        """Returns the row's value of any column, without a copy: a per-token column as (L,); None if absent.

        Never blocks.
        """
        batch = self.batch
        if name not in batch or not batch.has(name)[self.row]:
            return None
        if name in STANDARD and STANDARD[name].per_token and isinstance(batch[name], np.ndarray):
            return batch[name][batch.cu_seqlens[self.row] : batch.cu_seqlens[self.row + 1]]
        return batch[name][self.row]


def trajectories(
    batch: Batch, credit: Credit = _DEFAULT, *, whole_rows: bool = False, mask_truncated: bool = False
) -> tuple[list[Trajectory], dict[str, float]]:
    """Returns the rows of a packed batch, and metrics on where their advantages come from. Never blocks.

    The response begins where `prompt_length` says, or at the first trained token if that comes earlier or no
    length was recorded. Advantages are the record's own, or else come from the scores of its group.

    Args:
        batch: a packed `shmbridge.Batch`; its release ends no view.
        credit: how advantages are computed; `Credit(fallback=False)` refuses groups without their own.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole; otherwise not at all.
        mask_truncated: nothing is trained of rows whose `finish_reason` is known and not "stop"; their scores
            still count in their group. The metrics then count these rows, and those without a reason.

    Raises:
        ValueError: the batch is padded.
        NoAdvantages: a group has none, and the fallback is not allowed.
    """
    if batch.layout != "packed":
        raise ValueError(f"a {batch.layout} batch -> ask for layout='packed': every trainer pads for itself")
    facts = BatchFacts(batch, whole_rows=whole_rows)
    answers = trained = facts.trained_tokens
    ends: dict[str, float] = {}
    if mask_truncated:
        cut, unnamed = facts.truncated, facts.without_finish_reason
        trained = answers & ~np.repeat(cut, batch.lengths)
        ends = {"trajectories_truncated": cut.sum(), "trajectories_without_finish_reason": unnamed.sum()}
    require_advantages(facts, answers, credit)
    advantages, metrics = credited(facts, trained, credit, answers=answers)
    logprobs, recorded = _logprobs(batch, trained)
    own = batch.has("advantages") & credit.use_own
    starts, group_of = batch.cu_seqlens.tolist(), batch.group_index.tolist()
    lengths = _prompt_lengths(batch, answers)
    found: list[Trajectory] = []
    for row, (start, end) in enumerate(pairwise(starts)):
        follows = row and group_of[row] == group_of[row - 1]
        found.append(
            Trajectory(
                batch,
                row,
                found[-1].number + 1 if follows else 0,
                batch.tokens[start:end],
                int(lengths[row]),
                trained[start:end],
                advantages[start:end],
                logprobs[start:end] if recorded[row] else None,
                bool(own[row]),
            )
        )
    return found, metrics | ends


def columns_ignored(batch: Batch, read: Container[str]) -> dict[str, int]:
    """Returns column -> rows that have it, of the columns that `read` does not contain. Never blocks."""
    return {name: int(batch.has(name).sum()) for name in batch.columns if name not in read}


def _prompt_lengths(batch: Batch, trained: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Returns int64 (B,)."""
    rows = np.repeat(np.arange(len(batch)), batch.lengths)
    first = batch.lengths.astype(np.int64)
    np.minimum.at(first, rows[trained], batch.position_ids[trained])
    if batch.prompt_length is not None:
        said = batch.has("prompt_length") & (batch.prompt_length >= 0)
        first = np.where(said, np.minimum(first, batch.prompt_length), first)
    return first


def _logprobs(
    batch: Batch, trained: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Returns float32 (N,), 0 where nothing is trained, and bool (B,): rows in which every value is known."""
    if batch.inference_logprobs is None:
        return np.zeros(0, np.float32), np.zeros(len(batch), np.bool_)
    recorded = recorded_logprobs(batch.inference_logprobs)
    unknown = trained & np.isnan(recorded)
    rows = np.repeat(np.arange(len(batch)), batch.lengths)
    known = np.bincount(rows[unknown], minlength=len(batch)) == 0
    return np.where(trained, recorded, np.float32(0)), batch.has("inference_logprobs") & known


def lags(stamps: Iterable[int], version: int) -> list[int]:
    """Returns how many versions each stamp is behind this one; a stamp below 0 is left out."""
    return [max(0, version - stamp) for stamp in stamps if stamp >= 0 and version >= 0]


def unfit_rows(batch: Batch, longest_row: int | None, vocabulary: int | None) -> dict[int, tuple[str, str]]:
    """Returns row -> (kind, why), of the rows of a batch that cannot be trained. Never blocks."""
    found: dict[int, tuple[str, str]] = {}
    if longest_row is not None:
        for row in np.flatnonzero(batch.lengths > longest_row).tolist():
            found[row] = "too_long", f"has {batch.lengths[row]} tokens, and the trainer takes {longest_row}"
    if vocabulary is not None:
        places = np.flatnonzero((batch.tokens < 0) | (batch.tokens >= vocabulary))
        padded = batch.layout == "padded"
        starts = np.arange(len(batch)) * batch.tokens.shape[1] if padded else batch.cu_seqlens
        rows, first = np.unique(np.searchsorted(starts, places, side="right") - 1, return_index=True)
        for row, at in zip(rows.tolist(), places[first].tolist(), strict=True):
            why = f"has token {batch.tokens.flat[at]}, and the model knows {vocabulary}"
            found.setdefault(row, ("unknown_token", why))
    return found


def unfit_row(batch: Batch, row: int, unfit: tuple[str, str]) -> UnfitRow:
    """Returns the error that names a row of `unfit_rows`. Never blocks."""
    meta, at = batch.meta[row], int(batch.group_index[row])
    number = row - int(np.searchsorted(batch.group_index, at))
    return UnfitRow(
        f"row {number} of group {meta.group_id} of environment {meta.env_name!r} {unfit[1]}",
        hint='unfit="leave_out" trains without such rows, and counts them',
        row=number,
    )
