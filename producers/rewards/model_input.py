"""What a process reward model is given of a row, and at which of its tokens the value of each step is read.

`OwnTokens` for a model that has the policy's vocabulary, `OwnText` for one with a tokenizer of its own. Where
the steps end in the row itself is decided before, by a splitter; nothing here changes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.step_row import StepRow


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Token ids of the model's vocabulary, and the position whose output is the value of each step."""

    ids: list[int]
    reads: list[int]


class InputMaker(Protocol):
    """Makes the input of a model. Called in any thread."""

    def __call__(self, row: StepRow) -> ModelInput:
        """Returns the input for one row; as many reads as steps. Raises RewardsFailed."""
        ...


class OwnTokens:
    """The row's own ids, with a marker put in after each step.

    Args:
        marker: ids of the marker; its last one is read. Without any, the last token of each step is read.
        reuse: a step that has the marker's last id in it is read at the last of these, and gets no other.
        behind: ids at the end of a step that stay behind its marker, such as that of the end of a turn.
    """

    def __init__(
        self, marker: Sequence[int] = (), *, reuse: bool = False, behind: Collection[int] = ()
    ) -> None:
        self._marker, self._reuse, self._behind = list(marker), reuse, frozenset(behind)

    def __call__(self, row: StepRow) -> ModelInput:
        """Returns the whole row with its markers."""
        ids: list[int] = []
        reads: list[int] = []
        done = 0
        for start, end in zip(row.starts, row.ends, strict=True):
            own = self._own_marker(row.tokens, start, end)
            till = self._last_said(row.tokens, start, end) if own is None else own
            ids += [*row.tokens[done:till], *(self._marker if own is None else ())]
            reads.append(len(ids) - 1)
            done = till
        return ModelInput([*ids, *row.tokens[done:]], reads)

    def _own_marker(self, tokens: Sequence[int], start: int, end: int) -> int | None:
        """The index after the last marker in a step, if it is to be used."""
        if not (self._reuse and self._marker):
            return None
        return next((at + 1 for at in reversed(range(start, end)) if tokens[at] == self._marker[-1]), None)

    def _last_said(self, tokens: Sequence[int], start: int, end: int) -> int:
        said = (at + 1 for at in reversed(range(start, end)) if tokens[at] not in self._behind)
        return next(said, end)


class OwnText:
    """A question and the text of each step with a marker behind it, tokenised by the model's own tokenizer.

    What stands between two turns of the row, such as the result of a tool, is left out.

    Args:
        tokenizer: the model's, a fast one of transformers: it says which characters a token stands for.
        marker: text of the marker; the last token of each is read.
        begin: returns the text before the first step; by default the question and a space.
        between: text behind each marker but the last.
        special_tokens: whether the tokenizer adds its own, such as a BOS.
    """

    def __init__(
        self,
        tokenizer: Any,
        marker: str,
        *,
        begin: Callable[[StepRow], str] = lambda row: f"{row.question} ",
        between: str = "",
        special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._marker, self._begin = tokenizer, marker, begin
        self._between, self._special_tokens = between, special_tokens

    def __call__(self, row: StepRow) -> ModelInput:
        """Returns the tokens of the text."""
        text = self._begin(row)
        marker_ends: list[int] = []
        for step in row.step_texts:
            text += self._between if marker_ends else ""
            text += step.strip() + self._marker
            marker_ends.append(len(text))
        made = self._tokenizer(text, add_special_tokens=self._special_tokens, return_offsets_mapping=True)
        where = [(begin, at) for at, (begin, end) in enumerate(made["offset_mapping"]) if end > begin]
        begins = [begin for begin, _ in where]
        # the last token that begins at or before the marker's last character
        reads = [where[bisect_right(begins, end - 1) - 1][1] for end in marker_ends]
        ends = [made["offset_mapping"][read][1] for read in reads]
        if len(set(reads)) < len(reads) or any(a < b for a, b in zip(ends, marker_ends, strict=True)):
            raise RewardsFailed(
                f"the model's tokenizer has no token of its own for a marker {self._marker!r}",
                hint="another marker, or text between the steps",
            )
        return ModelInput(list(made["input_ids"]), reads)
