"""The stage that makes another score of an environment's, as a `RewardConfig` says, and keeps its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmbridge.producers.rewards.config import RewardConfig
from shmbridge.producers.rewards.config_file import read_config
from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.group_rows import new_group, score_column, token_rows, trained_spans
from shmbridge.producers.rewards.response_text import response_texts
from shmbridge.producers.rollout import TokenText


class RewardBridge:
    """A stage, `group = await stage(group)`: scores as a config says, their parts, and the environment's own.

    A config that is off leaves groups as they are. Any thread and any number of tasks may use it.

    Args:
        config: a `RewardConfig`, a mapping, or the path of a YAML file; see `read_config`.
        tokenizer: the policy's. Markers are looked for in the trained tokens it decodes; without one, in what
            the assistant says in the group's `messages`.

    Raises:
        BadConfig: of `read_config`.
    """

    def __init__(
        self, config: RewardConfig | Mapping[str, Any] | str | Path | None, *, tokenizer: Any = None
    ) -> None:
        self.config = read_config(config)
        self._text = None if tokenizer is None else TokenText(tokenizer)

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """`now`, for event loops: it decodes and searches, which takes milliseconds, and never waits."""
        return self.now(group)

    def now(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a new group with other scores, `raw_score` and `reward_components`. Never waits.

        The scores have the name they had. `raw_score` (float64) is the environment's own score; one that is
        there already stays. `reward_components` (map<utf8, float32>) has the parts, whose sum is the score,
        and what was there already under other names.

        Args:
            group: a mapping from column to rows, as `Producer.put` takes it; it is not changed.

        Raises:
            RewardsFailed: no scores; or no text, or mask, where the config needs it.
        """
        new = new_group(group)
        if self.config.is_off:
            return new
        tokens = token_rows(group)
        name, scores = score_column(group, len(tokens))
        parts = [
            self.config.components(score, text, length)
            for score, text, length in zip(scores, *self._measured(group, tokens), strict=True)
        ]
        own = new.get("reward_components")
        new[name] = [self.config.total(each) for each in parts]
        new["reward_components"] = parts if own is None else _together(own, parts)
        if new.get("raw_score") is None:
            new["raw_score"] = scores
        return new

    def _measured(
        self, group: Mapping[str, Any], tokens: Sequence[Sequence[int]]
    ) -> tuple[list[str], list[int]]:
        """Text and trained tokens of each row, as far as the config needs them."""
        texts, lengths = [""] * len(tokens), [0] * len(tokens)
        config, decodes = self.config, self.config.needs_text and self._text is not None
        counts = config.length_bounty is not None and config.length_bounty.per == "token"
        spans = trained_spans(group, tokens) if counts or decodes else [[] for _ in tokens]
        if config.needs_text:
            texts = response_texts(group, tokens, spans, self._text)
        if counts:
            lengths = [sum(end - begin for begin, end in row) for row in spans]
        return texts, lengths


def _together(own: Any, parts: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The environment's components and those made here, row by row."""
    rows = list(own)
    if len(rows) != len(parts):
        raise RewardsFailed(f"column 'reward_components' has {len(rows)} rows, tokens have {len(parts)}")
    both = []
    for there, made in zip(rows, parts, strict=True):
        if taken := set(there or {}) & set(made):
            raise RewardsFailed(
                f"the group has a reward component {min(taken)!r} already",
                hint="give the marker another name:",
            )
        both.append({**(there or {}), **made})
    return both
