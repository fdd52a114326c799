"""End-to-end checks: the learner trains with the values that were put, read back from micro-batches.

For a sample of rows a producer stores a checksum of the tokens, mask, log-probabilities and advantages
(`shmbridge.record.record`). The learner computes it again after gathering, `prepare` and the split into
micro-batches. For tokens that the learner's own masks exclude, it uses the values before masking. A row
trained twice, or not at all, also counts as different.

Letters: B rows, N tokens of the whole batch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmbridge import LeaseReleased
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.learner import Metrics
from shmbridge.consumers.learner.data.microbatch import MicroBatch
from shmbridge.consumers.learner.data.training_rows import TrainingRows
from shmbridge.metrics import rows_by_environment
from shmbridge.record import CHECKED_COLUMNS, check_of

Array = npt.NDArray[Any]

DIFFERENCE = "row_difference"  # key of the first difference in a step's metrics
_TAKEN = ("tokens", "trained", "sampled_logprobs", "advantages", "reference_logprobs")  # of a micro-batch


class RowCheck:
    """The comparison of one batch, from its rows to its micro-batches. One thread.

    Args:
        facts: of a packed batch, whose leases must be held until the end. Without `records` nothing
            is compared.
        rows: the result of `prepare`.
        credit: how its advantages were computed.
    """

    def __init__(self, facts: BatchFacts, rows: TrainingRows, credit: Credit) -> None:
        self._facts, self._rows, self._credit = facts, rows, credit
        self._records = list(getattr(facts.batch, "records", None) or ())
        self._first = np.cumsum([0, *(len(record) for record in self._records)])
        tokens = self._checks("tokens")
        self._checked: npt.NDArray[np.bool_] = tokens != 0
        self._stored = {"tokens": tokens}
        if self._checked.any():
            self._stored = {name: self._checks(name) for name in CHECKED_COLUMNS}
        # (rows, their lengths, flat values)
        self._seen: list[tuple[list[int], list[int], dict[str, Tensor]]] = []

    def _checks(self, column: str) -> npt.NDArray[np.uint64]:
        """Returns uint64, one checksum per row of the records; 0 if absent."""
        parts = []
        for record in self._records:
            try:
                said = record.row_checks(column)
            except LeaseReleased:  # released early: nothing to compare with
                said = None
            parts.append(np.zeros(len(record), np.uint64) if said is None else said)
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def record(self, micro: MicroBatch) -> None:
        """Copies the checked rows' values out of a micro-batch, on its device. Never blocks."""
        chosen = [
            place
            for place, row in enumerate(micro.row_numbers)
            if row < self._checked.size and self._checked[row]
        ]
        if not chosen:
            return
        lengths = np.asarray(micro.row_lengths)
        padded = micro.position_ids is None
        starts = np.arange(lengths.size) * micro.tokens.shape[1] if padded else np.cumsum(lengths) - lengths
        places = np.concatenate([np.arange(starts[each], starts[each] + lengths[each]) for each in chosen])
        index = torch.from_numpy(places).to(micro.tokens.device)
        columns = {name: getattr(micro, name) for name in _TAKEN}
        flat = {name: each.reshape(-1)[index] for name, each in columns.items() if each is not None}
        self._seen.append(([micro.row_numbers[each] for each in chosen], lengths[chosen].tolist(), flat))

    def metrics(self, *, describe: bool = True) -> Metrics:
        """Returns counters per environment, and the first difference. Blocks for copies from the device."""
        differences = self.differences()
        if not self._checked.any():
            return {}
        names = [record.meta.env_name for record in self._records for _ in range(len(record))]
        found: Metrics = {}
        for env, places in rows_by_environment(names).items():
            count = Counter(int(row) in differences for row in np.asarray(places) if self._checked[row])
            if count.total():
                found |= {f"rows_compared{{{env}}}": count.total(), f"rows_differ{{{env}}}": count[True]}
        if differences and describe:
            found[DIFFERENCE] = differences[min(differences)]
        return found

    def differences(self) -> dict[int, str]:
        """Returns a description of each checked row that differs. Blocks for copies from the device."""
        if not self._checked.any():
            return {}
        times: Counter[int] = Counter()
        found: dict[int, str] = {}
        silenced = self._facts.silenced
        for row, micro in self._taken():
            times[row] += 1
            wrong = self._compare(row, micro, row < silenced.size and bool(silenced[row]))
            if wrong:
                found.setdefault(row, wrong)
        row_count = len(self._rows.cu_seqlens) - 1
        for row in np.flatnonzero(self._checked).tolist():
            if row >= row_count:
                found[row] = self._said(row, "is in no row of the batch")
            elif times[row] > 1:
                found.setdefault(row, self._said(row, f"is trained {times[row]} times"))
            elif not times[row]:
                trains = bool(self._of(row, self._rows.trained).any())
                wrong = self._said(row, "is in no micro-batch") if trains else self._compare(row, None, False)
                if wrong:
                    found[row] = wrong
        return found

    def _taken(self) -> Any:
        """Yields (row, its values by name) of all copied rows, on the host."""
        for rows, lengths, flat in self._seen:
            values = {name: each.cpu().numpy() for name, each in flat.items()}
            ends = np.cumsum(lengths)
            for row, begin, end in zip(rows, (ends - lengths).tolist(), ends.tolist(), strict=True):
                yield row, {name: each[begin:end] for name, each in values.items()}

    def _of(self, row: int, values: Any) -> Array:
        """Returns a row's slice of (N,) values, on the host."""
        begin, end = self._rows.cu_seqlens[row : row + 2].tolist()
        part = values[begin:end]
        return part.cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)

    def _compare(self, row: int, micro: dict[str, Array] | None, silenced: bool) -> str:
        """Returns how a row differs, or "". Without `micro` it compares `prepare`'s values."""
        batch, rows = self._facts.batch, self._rows
        trained = self._of(row, rows.trained)
        cut = micro["trained"] if micro is not None else trained
        answers = trained if rows.answers is None else self._of(row, rows.answers)
        if not np.array_equal(cut, trained) or (trained & ~answers).any():
            at = np.flatnonzero(cut != trained) if cut.size == trained.size else np.zeros(0, np.intp)
            at = at if at.size else np.flatnonzero(trained & ~answers)
            what = "a token is trained that the mask leaves out, or left out on the way"
            return self._said(row, f"column 'loss_mask' {_position(at)}: {what}")
        values: dict[str, Array] = {
            "tokens": (micro["tokens"] if micro is not None else self._of(row, rows.tokens)).astype(np.int32)
        }
        if self._has("loss_mask", row):
            values["loss_mask"] = _mask(self._of(row, batch.loss_mask), answers)
        for column, name, whole in (
            ("inference_logprobs", "sampled_logprobs", rows.sampled_logprobs),
            ("ref_logprobs", "reference_logprobs", rows.reference_logprobs),
        ):
            if whole is None:
                continue
            sampled = micro[name] if micro is not None else self._of(row, whole)
            if self._has(column, row) or not np.isnan(sampled).all():
                values[column] = sampled
        if self._has("advantages", row):
            own = self._of(row, batch.advantages)
            as_put = micro is not None and self._as_put(silenced)
            values["advantages"] = (
                np.where(trained, micro["advantages"], own) if micro is not None and as_put else own
            )
        for column in CHECKED_COLUMNS:
            stored = int(self._stored[column][row])
            if column == "ref_logprobs" and rows.reference_logprobs is None:
                continue
            if column not in values:
                if stored:
                    return self._said(row, f"column {column!r} is missing, and was put")
            elif not stored:
                return self._said(row, f"column {column!r} is there, and was not put for this row")
            elif check_of(column, np.ascontiguousarray(values[column])) != stored:
                return self._said(row, self._where(row, column, values[column], stored))
        return ""

    def _has(self, column: str, row: int) -> bool:
        return self._facts.column(column) is not None and bool(self._facts.has(column)[row])

    def _as_put(self, silenced: bool) -> bool:
        """Returns whether the advantages of a row that has its own must equal the ones that were put."""
        credit = self._credit
        partly = self._facts.column("advantages_mask") is not None
        return (
            credit.use_own
            and credit.normalise == "none"
            and credit.clip is None
            and not partly
            and not silenced
        )

    def _where(self, row: int, column: str, values: Array, stored: int) -> str:
        """Returns where a column differs from the values still in the lane."""
        record, place = self._record_of(row)
        try:
            put = record[column][place]
        except (LeaseReleased, KeyError):
            return f"column {column!r}: at an unknown position, its record is not held any more"
        if check_of(column, put) != stored:
            return (
                f"column {column!r}: at an unknown position, the lane's own values have changed since they "
                "were put"
            )
        if put.size != values.size:
            return f"column {column!r}: {values.size} values, {put.size} were put"
        at = np.flatnonzero(
            put.view(np.uint8).reshape(put.size, -1) != values.view(np.uint8).reshape(put.size, -1)
        )
        first = int(at[0]) // put.itemsize if at.size else 0
        return f"column {column!r} position {first}: trained with {values[first]!s}, put was {put[first]!s}"

    def _record_of(self, row: int) -> tuple[Any, int]:
        number = int(np.searchsorted(self._first, row, side="right")) - 1
        return self._records[number], row - int(self._first[number])

    def _said(self, row: int, what: str) -> str:
        record, place = self._record_of(row)
        meta = record.meta
        return (
            f"producer {meta.producer_id} record {meta.sequence} row {place} of environment "
            f"{meta.env_name!r}: {what}"
        )


def _mask(put: Array, answers: Array) -> Array:
    """Returns the mask that the answers come from: as gathered where they agree with it."""
    agrees = (put != 0) == answers
    agrees[:1] = True
    return np.where(agrees, put, answers.astype(put.dtype))


def _position(places: Array) -> str:
    return f"position {int(places[0])}" if places.size else "with another length"
