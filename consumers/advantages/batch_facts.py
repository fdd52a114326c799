"""What is asked of a batch, read once: which rows have what, how they were sampled, why they ended, which
tokens are trained.

Pure numpy. Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.metrics import rows_by_environment, usable_scores
from shmbridge.schema import FINISH_REASONS

Bools = npt.NDArray[np.bool_]

_STOP = FINISH_REASONS.index("stop")
_GREEDY = 1e-5  # below this temperature samplers take the likeliest token
_LARGEST = float(np.finfo(np.float32).max)
_SETTINGS = re.compile("set_advantage_to_zero|temperature|top_p|top_k|min_p")


class BatchFacts:
    """The facts of a batch. Each is read when it is first asked for, and kept. One thread; never blocks.

    The arrays must not be written.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes.
        temperature: of rows without a usable one.
        whole_rows: rows with neither a mask nor `prompt_length` train all their tokens; else they train none.
    """

    def __init__(self, batch: shmbridge.Batch, temperature: float = 1.0, whole_rows: bool = False) -> None:
        self.batch, self.meta = batch, batch.meta
        self.lengths, self.cu_seqlens, self.group_index = batch.lengths, batch.cu_seqlens, batch.group_index
        self.columns: list[str] = getattr(batch, "columns", [])
        self.uneven: dict[str, Bools] = getattr(batch, "uneven", {})
        self._default, self._whole_rows = temperature, whole_rows
        self._has: dict[str, Bools] = {}

    @classmethod
    def of(cls, batch: shmbridge.Batch | BatchFacts) -> BatchFacts:
        """Returns the facts of a batch, or its argument."""
        return batch if isinstance(batch, BatchFacts) else cls(batch)

    def has(self, name: str) -> Bools:
        """Returns bool (B,): the rows that have a column, as the batch's `has`."""
        if name not in self._has:
            self._has[name] = self.batch.has(name)
        return self._has[name]

    def column(self, name: str) -> Any:
        """Returns a column's values; None if no record has it."""
        if self.columns:
            return self.batch[name] if name in self.columns else None
        return getattr(self.batch, name, None)

    @cached_property
    def scores(self) -> npt.NDArray[np.float64]:
        """float64 (B,): the scores; anything where they are not `scored`."""
        scores = self.batch.scores
        return np.zeros(len(self.meta)) if scores is None else np.asarray(scores, np.float64)

    @cached_property
    def scored(self) -> Bools:
        """bool (B,): rows with a usable score."""
        scored: Bools = self.has("score") & usable_scores(self.scores)
        return scored

    @cached_property
    def env_names(self) -> list[str]:
        """The environment of each row."""
        return [meta.env_name for meta in self.meta]

    @cached_property
    def environments(self) -> dict[str, npt.NDArray[np.intp]]:
        """The row numbers of each environment, by its name in metrics."""
        return rows_by_environment(self.env_names)

    @cached_property
    def versions(self) -> npt.NDArray[np.int64]:
        """int64 (B,): the policy version when generation of a row's record began; -1 if unknown."""
        stamped = [meta.min_policy_version for meta in self.meta]
        return np.array([-1 if version is None else version for version in stamped], np.int64)

    @cached_property
    def trained_tokens(self) -> Bools:
        """bool (N,): the loss mask, without the first token of each row, which nothing predicts.

        Rows without a mask train everything after the prompt. If `prompt_length` is absent too, they train
        nothing, or with `whole_rows` everything. Rows whose mask does not fit their tokens train nothing.
        """
        masked, lengths = self.has("loss_mask"), self.lengths
        trained: Bools
        if masked.size and masked.all():
            trained = self.batch.loss_mask != 0
        else:
            prompt = self.batch.prompt_length
            begins = np.zeros(len(lengths), np.int32) if prompt is None else prompt
            trained = self.batch.position_ids >= np.repeat(begins, lengths)
            trained &= ~np.repeat(self.without_mask, lengths)
            if masked.any():
                trained = np.where(np.repeat(masked, lengths), self.batch.loss_mask != 0, trained)
        trained[self.cu_seqlens[:-1][np.asarray(lengths) > 0]] = False
        return trained

    @cached_property
    def without_mask(self) -> Bools:
        """bool (B,): rows of which it is unknown which tokens to train.

        If a mask does not fit its tokens, some tokens must not be trained, but which ones is unknown. So
        neither `prompt_length` nor `whole_rows` replaces it.
        """
        without = np.full(len(self.meta), not self._whole_rows)
        if (prompt := self.batch.prompt_length) is not None:
            without &= ~(self.has("prompt_length") & (prompt >= 0))
        for name in ("loss_mask", "masks"):
            without |= self.uneven.get(name, False)
        rows: Bools = without & ~self.has("loss_mask")
        return rows

    @cached_property
    def without_finish_reason(self) -> Bools:
        """bool (B,): rows without a known `finish_reason`."""
        if (reasons := self.column("finish_reason")) is None:
            return np.ones(len(self.meta), bool)
        known: Bools = self.has("finish_reason") & (np.asarray(reasons) < len(FINISH_REASONS))
        return ~known

    @cached_property
    def truncated(self) -> Bools:
        """bool (B,): rows whose known `finish_reason` is not "stop"."""
        if (reasons := self.column("finish_reason")) is None:
            return np.zeros(len(self.meta), bool)
        rows: Bools = ~self.without_finish_reason & (np.asarray(reasons) != _STOP)
        return rows

    @cached_property
    def silenced(self) -> Bools:
        """bool (B,): rows whose overrides set their advantage to zero."""
        silenced = np.zeros(len(self.meta), bool)
        for row, wanted in self._settings["set_advantage_to_zero"]:
            silenced[row] = bool(wanted)
        return silenced

    @cached_property
    def cut_sampling(self) -> Bools:
        """bool (B,): rows sampled with top_p, top_k or min_p."""
        cut = np.zeros(len(self.meta), bool)
        for key, limit in (("top_p", 1.0), ("top_k", 0.0), ("min_p", 0.0)):
            by_key = np.zeros(len(self.meta), bool)
            for row, value in self._settings[key]:
                by_key[row] = isinstance(value, (int, float)) and (
                    value < limit if key == "top_p" else value > limit
                )
            cut |= by_key
        return cut

    @cached_property
    def temperatures(self) -> npt.NDArray[np.float32]:
        """float32 (B,) > 0: from the record's column, else from Atropos' field, else the default.

        Rows whose value is not a number, or so small that sampling is greedy, get the default too: one bad
        value must not end the run, and the runs that get the record redelivered.
        """
        values = self._recorded_temperatures[0]
        return np.where(np.isfinite(values) & ~self.greedy, values, np.float32(self._default))

    @cached_property
    def odd_temperature(self) -> Bools:
        """bool (B,): rows whose temperature is not a finite number."""
        values, odd = self._recorded_temperatures
        return odd | ~np.isfinite(values)

    @cached_property
    def greedy(self) -> Bools:
        """bool (B,): rows with a temperature below 1e-5, whose distribution cannot be scaled."""
        values = self._recorded_temperatures[0]
        return np.isfinite(values) & (values < _GREEDY)  # 1 / temperature would scale the row's gradient

    @cached_property
    def _recorded_temperatures(self) -> tuple[npt.NDArray[np.float32], Bools]:
        """float32 (B,), as recorded, else the default; bool (B,): a setting is not a finite number."""
        values = np.full(len(self.meta), self._default, np.float32)
        odd = np.zeros(len(self.meta), bool)
        for row, value in self._settings["temperature"]:
            if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < _LARGEST:
                values[row] = value
            else:
                odd[row] = True
        if (column := self.column("temperature")) is not None:
            values = np.where(self.has("temperature"), column, values)
        return values, odd

    @cached_property
    def _settings(self) -> defaultdict[str, list[tuple[int, Any]]]:
        """(row, value) by key, the widest settings first; later ones win, as in Atropos' own trainer."""
        found: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        for name in ("group_overrides", "generation_params", "overrides"):
            for row, text in enumerate(self.column(name) or ()):
                if text is None or _SETTINGS.search(text) is None:  # parse only what may matter
                    continue
                for key, value in _parsed(text).items():
                    if value is not None and (key != "set_advantage_to_zero" or name == "overrides"):
                        found[key].append((row, value))
        return found


@lru_cache(1024)  # rows of one record share a text
def _parsed(text: str) -> dict[str, Any]:
    """Returns the parsed JSON object; empty for anything else."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
