"""Answers as servers give them, rows as environments send them, and what is read of a stamp, for the tests of
both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbridge.producers.atropos.versions import Ledger, Stamp
from shmbridge.producers.rollout.sampling import completions_in

BEGAN, NOW = 40, 90
PROMPT = [7, 8, 9]
LONG = list(range(100, 130))


def said(*spans: tuple[Any, int, int]) -> list[dict[str, Any]]:
    return [{"version": str(version), "start": start, "end": end} for version, start, end in spans]


def generated(
    prompt: list[int] | None, *answers: tuple[list[int], list[dict[str, Any]] | None], **more: Any
) -> dict[str, Any]:
    body = {"token_ids": [tokens for tokens, _ in answers], "finish_reasons": ["stop"] * len(answers), **more}
    if any(spans is not None for _, spans in answers):
        body["weight_versions"] = [spans for _, spans in answers]
    return body if prompt is None else body | {"prompt_token_ids": prompt}


def under(prompt: list[int] | None, output: list[int], version: Any) -> dict[str, Any]:
    return generated(prompt, (output, said((version, 0, len(output)))))


def ledger_of(*bodies: Any) -> Ledger:
    ledger = Ledger()
    for body in bodies:
        ledger.note(completions_in(body))
    return ledger


def group(*rows: tuple[list[int], list[int]], **more: Any) -> dict[str, Any]:
    """Rows of (masked, trained) tokens in turn."""
    tokens = [[token for part in row for token in part] for row in rows]
    masks = [[token if at % 2 else -100 for at, part in enumerate(row) for token in part] for row in rows]
    return {"tokens": tokens, "masks": masks, "scores": [0.0] * len(rows), **more}


def column(stamped: Stamp) -> list[list[int]]:
    flat, lengths = stamped.column
    assert flat.dtype == np.int32
    ends = np.cumsum(lengths)
    return [flat[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


def bounds(stamped: Stamp) -> tuple[int, int]:
    return stamped.oldest, stamped.newest
