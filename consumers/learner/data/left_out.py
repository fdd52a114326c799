"""Counts, per environment, the data that training cannot use or leaves out; each kind is reported once.

These are rows whose column does not fit their tokens, rows without a mask, greedy and truncated sampling, and
columns that this learner does not read. Pure numpy.

Letter: B rows (trajectories).
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.advantages.row_settings import Heat, cut_sampling
from shmbridge.consumers.advantages.trained_tokens import without_mask
from shmbridge.consumers.learner.types import Metrics, Untrainable
from shmbridge.metrics import rows_by_environment

Bools = npt.NDArray[np.bool_]

# Columns that training always reads, and columns that describe a row and are not meant for a loss.
_KNOWN = frozenset(
    {
        *("tokens", "prompt_length", "loss_mask", "masks", "score", "advantages", "advantages_mask"),
        *("inference_logprobs", "token_versions", "temperature", "finish_reason"),
        *("overrides", "group_overrides", "generation_params"),
        *("raw_score", "messages", "extra", "instance_id", "repetition_id", "row_index", "is_last"),
        *("turn_ends", "trace_spans", "env_id"),
    }
)
_NOTHING = frozenset({None, "", "null", "[]", "{}", '""'})

_SAID = {
    "trajectories_uneven": (
        "{count} trajectories have another number of values of {column} than tokens; these are left out -> "
        "write one value for each token, prompt included"
    ),
    "trajectories_without_mask": (
        "{count} trajectories have neither a mask nor prompt_length, or a mask that does not fit their "
        "tokens, and train nothing -> write loss_mask, one value for each token; --train-whole-rows is for "
        "rows without any"
    ),
    "trajectories_unknown_tokens": (
        "{count} trajectories have a token id that the model does not have, and train nothing -> start the "
        "environment with the learner's tokenizer"
    ),
    "trajectories_too_long": (
        "{count} trajectories are longer than the model's positions or --max-token-len, and train nothing -> "
        "have the environment end its episodes earlier"
    ),
    "trajectories_odd_versions": (
        "{count} trajectories say a policy version above the one that is trained, or a token version below "
        "-1; their age is unknown -> write the version that sampled each token, -1 where none did"
    ),
    "trajectories_binary_mask": (
        "{count} trajectories have masks of 0 and 1; Atropos masks are -100 where nothing is trained, so "
        "all their tokens are -> write -100 and token ids, or loss_mask"
    ),
    "trajectories_greedy": (
        "{count} trajectories were sampled at a temperature below 1e-5, whose log-probabilities say "
        "nothing; --temperature is used -> sample at the temperature that is trained"
    ),
    "trajectories_cut_sampling": (
        "{count} trajectories were sampled with top_p, top_k or min_p; ratios to their log-probabilities "
        "are biased -> sample with top_p=1 and without top_k and min_p"
    ),
    "columns_ignored": "{count} trajectories have {column}, which this learner does not read",
}
_COUNTER = re.compile(r"^atropos/([^/]+)/(\w+)(?:[{/](.+?)}?)?$")  # environment, counter, column


class UnreadImages(Untrainable):
    """A batch has images, which this learner does not read; the message names the environment."""


def refuse_images(batch: shmbridge.Batch) -> None:
    """Raises `UnreadImages` if a row has images: its rollout depends on more than the text. Never blocks."""
    rows = np.flatnonzero(_filled(batch, "images"))
    if rows.size:
        meta = batch.meta[int(rows[0])]
        raise UnreadImages(
            f"{rows.size} trajectories have images, first in group {meta.group_id} of environment "
            f"{meta.env_name!r}: this learner trains text, and would take them for answers to the text "
            "alone -> --ignore-images, which trains the text alone"
        )


def left_out(
    batch: shmbridge.Batch,
    credit: Credit,
    heat: Heat,
    *,
    whole_rows: bool,
    with_reference: bool,
    unknown_tokens: Bools | None = None,
    too_long: Bools | None = None,
    odd_versions: Bools | None = None,
) -> Metrics:
    """Returns the counters of a batch, in total and per environment. Never blocks.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes.
        credit: which columns advantages are computed from.
        heat: the batch's temperatures.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole.
        with_reference: whether the reference's log-probabilities are read.
        unknown_tokens, too_long: bool (B,), rows left out for a token outside the vocabulary, or for their
            length; None: no such row.
        odd_versions: bool (B,), rows with impossible policy versions; None: no such row.
    """
    none = np.zeros(len(batch.meta), bool)
    rows = {
        "trajectories_unknown_tokens": none if unknown_tokens is None else unknown_tokens,
        "trajectories_too_long": none if too_long is None else too_long,
        "trajectories_odd_versions": none if odd_versions is None else odd_versions,
        "trajectories_without_mask": without_mask(batch, whole_rows),
        "trajectories_binary_mask": _binary_masks(batch),
        "trajectories_greedy": heat.greedy,
        "trajectories_cut_sampling": cut_sampling(batch),
        **{f"trajectories_uneven{{{name}}}": uneven for name, uneven in getattr(batch, "uneven", {}).items()},
    }
    used = {"step_rewards", "step_ends"} if credit.steps != "off" else set()
    if credit.token_rewards != "off":
        used.add("token_rewards")
    if with_reference:
        used.add("ref_logprobs")
    for name in getattr(batch, "columns", ()):
        if name not in _KNOWN | used and (there := _filled(batch, name)).any():
            rows[f"columns_ignored/{name}"] = there
    found: Metrics = {name: int(which.sum()) for name, which in rows.items()}
    for env_name, of_it in rows_by_environment([meta.env_name for meta in batch.meta]).items():
        found |= {
            f"atropos/{env_name}/{name}": count
            for name, which in rows.items()
            if (count := int(which[of_it].sum()))
        }
    return found


def rows_with_unknown_tokens(batch: shmbridge.Batch, vocabulary: int) -> Bools | None:
    """Returns bool (B,): rows with a token id outside 0 .. `vocabulary` - 1, or None. Waits for a device."""
    tokens = batch.tokens
    if not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocabulary:
        return None
    outside = (tokens < 0) | (tokens >= vocabulary)
    places = np.flatnonzero(outside if isinstance(outside, np.ndarray) else outside.cpu().numpy())
    rows = np.zeros(len(batch.meta), bool)
    rows[np.searchsorted(batch.cu_seqlens, places, side="right") - 1] = True
    return rows


class SaidOnce:
    """Explains each counter of each environment once, the first time it is not 0."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def sentences(self, metrics: Metrics) -> list[str]:
        """Returns the new explanations for a step's metrics over all ranks. Never blocks."""
        found = []
        for name, count in metrics.items():
            match = _COUNTER.match(name)
            if match is None or match[2] not in _SAID or not count or name in self._said:
                continue
            self._said.add(name)
            found.append(
                f"environment {match[1]}: {_SAID[match[2]].format(count=count, column=match[3])}; counted "
                f"as {match[2]}"
            )
        return found


def _filled(batch: shmbridge.Batch, name: str) -> Bools:
    """Returns bool (B,): rows in which a column has a value; text that means "nothing" does not count."""
    has: Bools = batch.has(name)
    values = getattr(batch, name, None) if has.any() else None
    if isinstance(values, list):
        has = has & np.array(
            [value not in _NOTHING if isinstance(value, str) else bool(value) for value in values], bool
        )
    return has


def _binary_masks(batch: shmbridge.Batch) -> Bools:
    """Returns bool (B,): rows whose column `masks`, which should have -100 and token ids, has 0 and 1."""
    rows: Bools = batch.has("masks")
    if not rows.any():
        return rows
    masks = batch["masks"]
    odd = (masks < 0) | (masks > 1)
    before = np.concatenate([[0], np.cumsum(odd)])
    binary: Bools = rows & (np.diff(before[batch.cu_seqlens]) == 0) & (batch.lengths > 0)
    return binary
