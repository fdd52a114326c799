"""Reads the rows of a group in the forms that `Producer.put` takes: tokens, the trained ones, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from shmbridge.producers.rewards.errors import RewardsFailed

Span: TypeAlias = tuple[int, int]  # first token, and the index after the last


def new_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a new mapping of the same columns. Raises RewardsFailed if the group is not a mapping."""
    if not isinstance(group, Mapping):
        raise RewardsFailed(
            f"a {type(group).__name__} cannot be given rewards",
            hint="a group is a mapping from column to rows; pass batch.to_pydict() of an Arrow batch",
        )
    return dict(group)


def token_rows(group: Mapping[str, Any]) -> list[list[int]]:
    """Returns the tokens of each row. Raises RewardsFailed if the group has none."""
    if group.get("tokens") is None:
        raise RewardsFailed("the group has no tokens", hint='{"tokens": [[1, 2], [3]], ...}')
    return _integers("tokens", group["tokens"])


def trained_spans(group: Mapping[str, Any], tokens: Sequence[Sequence[int]]) -> list[list[Span]]:
    """Returns the runs of trained tokens of each row, in order.

    They are read from `loss_mask`, Atropos' `masks`, or `prompt_length`, whichever is there first. A row
    whose mask has another length than its tokens has none: which of its tokens are trained is unknown.

    Raises:
        RewardsFailed: the group has none of the three, or not one value per row.
    """
    for name, untrained in (("loss_mask", 0), ("masks", -100)):
        if group.get(name) is not None:
            masks = _integers(name, group[name])
            _check_rows(name, len(masks), len(tokens))
            return [
                _runs(mask, untrained) if len(mask) == len(row) else []
                for mask, row in zip(masks, tokens, strict=True)
            ]
    if group.get("prompt_length") is not None:
        lengths = [int(each) for each in group["prompt_length"]]
        _check_rows("prompt_length", len(lengths), len(tokens))
        return [
            [(length, len(row))] if length < len(row) else []
            for length, row in zip(lengths, tokens, strict=True)
        ]
    raise RewardsFailed(
        "which tokens are the response is unknown", hint="give the group loss_mask, masks or prompt_length"
    )


def score_column(group: Mapping[str, Any], rows: int) -> tuple[str, list[float]]:
    """Returns the name under which a group has its scores, and the scores. Raises RewardsFailed."""
    name = "scores" if group.get("scores") is not None else "score"
    if group.get(name) is None:
        raise RewardsFailed("the group has no score", hint='"score": one number per row')
    try:
        scores = [float(each) for each in group[name]]
    except (TypeError, ValueError) as wrong:
        raise RewardsFailed(f"column {name!r} is not one number per row: {wrong}") from wrong
    _check_rows(name, len(scores), rows)
    return name, scores


def _check_rows(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise RewardsFailed(f"column {name!r} has {found} rows, tokens have {rows}")


def _integers(name: str, column: Any) -> list[list[int]]:
    try:
        return [
            row.tolist() if hasattr(row, "tolist") else [] if row is None else [int(each) for each in row]
            for row in _rows(column)
        ]
    except (TypeError, ValueError) as wrong:
        raise RewardsFailed(f"column {name!r} is not rows of integers: {wrong}") from wrong


def _rows(column: Any) -> Any:
    """The rows of a column; those of (flat array, lengths) are cut out of it."""
    pair = isinstance(column, tuple) and len(column) == 2 and getattr(column[0], "ndim", 0) == 1
    if not pair or (hasattr(column[1], "dtype") and "int" not in str(column[1].dtype)):
        return column
    flat, rows, at = column[0], [], 0
    for length in column[1]:
        rows.append(flat[at : at + int(length)])
        at += int(length)
    return rows


def _runs(mask: Sequence[int], untrained: int) -> list[Span]:
    runs, begin = [], -1
    for at, value in enumerate(mask):
        if value == untrained:
            if begin >= 0:
                runs.append((begin, at))
            begin = -1
        elif begin < 0:
            begin = at
    return [*runs, (begin, len(mask))] if begin >= 0 else runs
