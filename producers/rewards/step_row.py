"""One row as a scorer of steps sees it: its tokens, where its steps are, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.group_rows import Span
from shmbridge.producers.rollout import TokenText


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row and its steps; step k is `tokens[starts[k]:ends[k]]`. Any thread may read it."""

    tokens: Sequence[int]  # the whole row, prompt and response
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    messages: Any = None  # the row's messages, if the group has them
    text: TokenText | None = None

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        spans: Sequence[Span],
        ends: Sequence[int],
        messages: Any = None,
        text: TokenText | None = None,
    ) -> StepRow:
        """Returns the row; a step starts at the first trained token after the one before it."""
        starts, before = [], 0
        for end in ends:
            starts.append(next((max(a, before) for a, b in spans if b > before), before))
            before = end
        return cls(tokens, tuple(starts), tuple(ends), messages, text)

    @property
    def step_texts(self) -> list[str]:
        """The text of each step, special tokens left out. Raises RewardsFailed without a tokenizer."""
        text = self._decoder()
        return [
            text.text(self.tokens[a:b], special=False) for a, b in zip(self.starts, self.ends, strict=True)
        ]

    @property
    def prompt_text(self) -> str:
        """The text before the first step, without special tokens. Raises RewardsFailed as `step_texts`."""
        return self._decoder().text(self.tokens[: self.starts[0] if self.starts else None], special=False)

    @property
    def question(self) -> str:
        """What a user said last in `messages`; without messages, `prompt_text`."""
        said = self.messages if isinstance(self.messages, (list, tuple)) else ()
        asked = [each["content"] for each in said if each.get("role") == "user"]
        return str(asked[-1]) if asked else self.prompt_text

    def _decoder(self) -> TokenText:
        if self.text is None:
            raise RewardsFailed(
                "this scorer reads text, and no tokenizer decodes the row",
                hint="StepRewards(..., tokenizer=the policy's)",
            )
        return self.text
