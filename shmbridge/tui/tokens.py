"""One row of a record as marked text: tokens coloured by advantage, rewards at the ends of their steps.

Meaning is never by colour alone: raised tokens begin with `⁺`, lowered ones with `⁻` and are underlined,
those not trained are dim. A step reward stands as `⟨0.42⟩` behind its last token.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from textual.content import Content

from shmbridge.tui.source import Readable
from shmbridge.watch.record_lines import group_of
from shmbridge.watch.text import printable

PAGE = 1000  # tokens shown at once
_CREDIT = ("advantages", "token_rewards")  # the first that is there gives the colours
_RAISED = ("on #12351c", "on #175227", "on #1c7434", "on #229a43")  # small to large
_LOWERED = ("on #3d1a1a", "on #5f1f1f", "on #882525", "on #b52c2c")
_NAMES_OF = {"advantages": "advantage", "token_rewards": "token reward"}

Pieces = Callable[[Sequence[int]], list[str]]


def marked(record: Readable, row: int, pieces: Pieces | None = None, first: int = 0) -> Content:
    """Returns the tokens of a row, from the `first` on, at most a page of them.

    Args:
        record: a copy of a record.
        row: its number in the record.
        pieces: the text of each of some token ids; None: ids are shown.
        first: the token that the page begins with.
    """
    tokens = row_of(record, "tokens", row)
    last = min(first + PAGE, len(tokens))
    shown = [int(each) for each in tokens[first:last]]
    texts = [str(each) for each in shown] if pieces is None else [_visible(each) for each in pieces(shown)]
    signs, styles = _styles(record, row, len(tokens))
    rewards = _rewards(record, row)
    parts: list[tuple[str, str]] = []
    before = 0
    for number, text in enumerate(texts, first):
        if number > first and pieces is None:
            parts.append((" ", ""))
        if signs[number] and (signs[number] != before or number == first):
            parts.append(("⁺" if signs[number] > 0 else "⁻", "bold"))
        before = signs[number]
        parts.append((text, styles[number]))
        parts += [(f"⟨{_number(reward)}⟩", "bold yellow") for reward in rewards.get(number + 1, ())]
    late = [end for end in rewards if not 1 <= end <= len(tokens)]
    if late and last == len(tokens):
        parts.append(
            (f"\n{len(late)} step ends are outside of the row: {', '.join(map(str, sorted(late)))}", "bold")
        )
    # neighbours of one style are one part: a thousand tokens are shown at once
    return Content.assemble(
        *(("".join(text for text, _ in each), style) for style, each in groupby(parts, _style))
    )


def summary(record: Readable, row: int, newest_version: int | None) -> list[str]:
    """Returns the facts about a record and one of its rows, a part each."""
    meta = record.meta
    parts = [
        printable(meta.producer_id),
        f"record {meta.sequence}",
        f"group {printable(group_of(meta))}",
        f"row {row + 1} of {len(record)}"
        + (f" (group of {meta.group_size})" if meta.group_size != len(record) else ""),
    ]
    if meta.min_policy_version >= 0:
        lag = "" if newest_version is None else f", lag {max(newest_version - meta.min_policy_version, 0)}"
        parts.append(f"policy version {meta.min_policy_version}{lag}")
    parts += [meta.split] * (meta.split != "train") + ["redelivered"] * meta.redelivered
    tokens = row_of(record, "tokens", row)
    mask = row_of(record, "loss_mask", row)
    trained = f", {int(np.count_nonzero(mask))} trained" if len(mask) else ""
    parts.append(f"{len(tokens):,} tokens{trained}")
    if "score" in record.columns and row < len(record["score"]):
        parts.append(f"score {_number(record['score'][row])}")
    name = credit(record)
    if name and len(values := row_of(record, name, row)):
        parts.append(f"{_NAMES_OF[name]} {_number(values.min())} to {_number(values.max())}")
    if len(rewards := row_of(record, "step_rewards", row)):
        parts.append(f"{len(rewards)} step rewards: {' '.join(_number(each) for each in rewards[:8])}")
    return parts


def legend(record: Readable) -> str:
    """Returns how to read the marks of a record."""
    name = credit(record)
    if not name:
        return "no advantages in this record; dim: not trained; ⟨0.42⟩: reward of the step that ends here"
    return (
        f"⁺ green: {_NAMES_OF[name]} above 0; ⁻ red, underlined: below; deeper: larger; "
        "dim: not trained; ⟨0.42⟩: reward of the step that ends here"
    )


def credit(record: Readable) -> str:
    """Returns the column that gives the colours; "" if the record has none."""
    return next((name for name in _CREDIT if name in record.columns), "")


def row_of(record: Readable, name: str, row: int) -> np.ndarray[Any, Any]:
    """Returns one row of a ragged column; empty if the column, or the row, is not there."""
    if name not in record.columns:
        return np.empty(0)
    lengths = record[name].lengths
    if row >= len(lengths):
        return np.empty(0)
    start = int(lengths[:row].sum())
    values: np.ndarray[Any, Any] = record[name].values[start : start + int(lengths[row])]
    return values


def _styles(record: Readable, row: int, count: int) -> tuple[list[int], list[str]]:
    """Returns the sign and the style of each token of a row."""
    name = credit(record)
    values = np.zeros(count)
    if name:
        found = row_of(record, name, row)[:count]
        values[: len(found)] = np.nan_to_num(found)
        most = float(np.abs(np.nan_to_num(record[name].values)).max(initial=0.0)) or 1.0
    mask = row_of(record, "loss_mask", row)
    trained = np.ones(count, bool)
    trained[: len(mask)] = mask[:count] != 0
    signs, styles = [], []
    for value, is_trained in zip(values.tolist(), trained.tolist(), strict=True):
        level = min(int(abs(value) / most * len(_RAISED)), len(_RAISED) - 1) if value else 0
        style = "" if value == 0 else _RAISED[level] if value > 0 else f"underline {_LOWERED[level]}"
        signs.append((value > 0) - (value < 0))
        styles.append(style if is_trained else f"dim {style}".strip())
    return signs, styles


def _rewards(record: Readable, row: int) -> dict[int, list[float]]:
    """Step rewards of a row by the exclusive end of their step."""
    found: dict[int, list[float]] = {}
    for end, reward in zip(
        row_of(record, "step_ends", row), row_of(record, "step_rewards", row), strict=False
    ):
        found.setdefault(int(end), []).append(float(reward))
    return found


def _style(part: tuple[str, str]) -> str:
    return part[1]


def _visible(text: str) -> str:
    """Text of a token with line ends shown and kept, other invisible characters escaped."""
    return "↵\n".join(printable(line) for line in text.split("\n"))


def _number(value: float) -> str:
    return f"{float(value):.3g}"
