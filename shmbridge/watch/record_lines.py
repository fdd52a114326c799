"""A record in one line, and its rows in one line each: for `tail`.

Knows what a record says; knows nothing of bridges and screens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shmbridge.record import Record, RecordMeta
from shmbridge.watch.text import printable

Pieces = Callable[[Sequence[int]], list[str]]
_REWARDS = 6  # step rewards shown of one row
_SHORT = 60  # characters of a prompt's end that are shown before a completion
_PROMPT = 100  # tokens of its end that are decoded for them


def line_of(record: Record, newest_version: int | None) -> str:
    """Returns the record in one line: who, which group, version, size, scores, advantages, step rewards."""
    meta = record.meta
    of_group = f"{len(record)}/{meta.group_size}" if meta.group_size > 0 else f"{len(record)}"
    parts = [
        f"{printable(meta.producer_id)}#{meta.sequence}",
        f"group {printable(group_of(meta))} ({of_group})",
    ]
    if meta.split != "train":
        parts.append(meta.split)
    if meta.min_policy_version >= 0:
        behind = "" if newest_version is None else f" ({meta.min_policy_version - newest_version:+d})"
        parts.append(f"v{meta.min_policy_version}{behind}")
    parts.append(_tokens(record))
    if scores := _finite(record, "score"):
        parts.append(f"score {np.mean(scores):.3g}" + _span(scores))
    if advantages := _finite(record, "advantages"):
        parts.append(f"adv {min(advantages):.2f}..{max(advantages):.2f}")
    if rewards := _finite(record, "step_rewards"):
        parts.append(f"{len(rewards)} steps {min(rewards):.2f}..{max(rewards):.2f}")
    return "  ".join(parts)


def group_of(meta: RecordMeta) -> str:
    """Returns the id of the record's group; of one that its producer has numbered, the number alone."""
    return meta.group_id.removeprefix(f"{meta.producer_id}:")


def rows_of(record: Record, pieces: Pieces | None = None) -> list[str]:
    """Returns a line per row; with `pieces`, the text of each token of some ids, also its completion.

    Step rewards stand behind the last token of their step: ⟨0.42⟩.
    """
    return [_row(record, row, pieces) for row in range(len(record))]


def facts_of(record: Record) -> dict[str, Any]:
    """Returns the record's metadata and sums, for a program."""
    meta = record.meta
    return {
        "producer_id": meta.producer_id,
        "sequence": meta.sequence,
        "env_name": meta.env_name,
        "env_id": meta.env_id,
        "group_id": meta.group_id,
        "group_size": meta.group_size,
        "rows": len(record),
        "split": meta.split,
        "min_policy_version": meta.min_policy_version,
        "max_policy_version": meta.max_policy_version,
        "t_created_ns": meta.t_created_ns,
        "t_publish_ns": meta.t_publish_ns,
        "tokens": record.token_count,
        "columns": record.columns,
        "scores": record["score"].tolist() if "score" in record else None,
    }


def _row(record: Record, row: int, pieces: Pieces | None) -> str:
    ids = _of_row(record, "tokens", row)
    parts = [f"  {row + 1}: {len(ids):,} tokens"]
    if "score" in record and row < len(record["score"]):
        parts.append(f"score {record['score'][row]:.3g}")
    advantages = _of_row(record, "advantages", row)
    if len(advantages):
        parts.append(f"adv {advantages.min():.2f}..{advantages.max():.2f}")
    rewards, ends = _of_row(record, "step_rewards", row), _of_row(record, "step_ends", row)
    if len(rewards) and pieces is None:
        shown = " ".join(f"{each:.2f}" for each in rewards[:_REWARDS])
        parts.append(f"steps {shown}" + (" …" if len(rewards) > _REWARDS else ""))
    if pieces is not None:
        parts.append(_text(ids.tolist(), _first_trained(record, row), ends, rewards, pieces))
    return "  ".join(parts)


def _text(
    ids: list[int], begin: int, ends: np.ndarray[Any, Any], rewards: np.ndarray[Any, Any], pieces: Pieces
) -> str:
    """The end of the prompt, and the completion with its step rewards."""
    first = max(begin - _PROMPT, 0)
    texts = pieces(ids[first:])
    marks: dict[int, str] = {}
    for end, reward in zip(ends.tolist(), rewards.tolist(), strict=False):
        marks[end] = marks.get(end, "") + f"⟨{reward:.2f}⟩"
    completion = enumerate(texts[begin - first :], begin + 1)
    said = "".join(text + marks.get(number, "") for number, text in completion)
    prompt = "".join(texts[: begin - first])
    cut = f"…{prompt[-_SHORT:]}" if first or len(prompt) > _SHORT else prompt
    return f"{printable(cut)!s} → {printable(said)!s}"


def _first_trained(record: Record, row: int) -> int:
    """Where the completion begins: prompt_length, else the first token that the mask trains."""
    if "prompt_length" in record and row < len(record["prompt_length"]):
        return int(record["prompt_length"][row])
    trained = np.flatnonzero(_of_row(record, "loss_mask", row))
    return int(trained[0]) if trained.size else 0


def _tokens(record: Record) -> str:
    trained = f", {np.count_nonzero(record['loss_mask'].values):,} trained" if "loss_mask" in record else ""
    return f"{record.token_count:,} tokens{trained}"


def _finite(record: Record, name: str) -> list[float]:
    """All finite values of a column; none if it is absent."""
    if name not in record:
        return []
    column = record[name]
    values = np.asarray(column if isinstance(column, np.ndarray) else column.values, np.float64)
    found: list[float] = values[np.isfinite(values)].tolist()
    return found


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return "" if low == high else f" ({low:.3g} to {high:.3g})"


def _of_row(record: Record, name: str, row: int) -> np.ndarray[Any, Any]:
    """One row of a list column; empty if the column or the row is not there."""
    if name not in record or row >= len(column := record[name]):
        return np.empty(0)
    found: np.ndarray[Any, Any] = column[row]
    return found
