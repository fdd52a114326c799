"""Where the steps of a row end: after a tag, a blank line, a token, or a turn; as indices of its own tokens.

Ends are exclusive, count from the row's first token, rise, and lie in trained spans. What is left of a span
after the last tag is a step, too. A step without any text joins the one before it in its span, or, as the
first, the one after it; a span without any text has no step.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

from shmbridge.errors import BadArgument, ShmBridgeError
from shmbridge.producers.rollout import TokenText

Span: TypeAlias = tuple[int, int]  # first token, and the index after the last


class RewardsFailed(ShmBridgeError, RuntimeError):
    """A group could not be given its rewards; nothing of it was put."""

    code = "SB420"


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


class StepSplitter(Protocol):
    """Says where steps end. Called in any thread; may take as long as decoding a row."""

    def __call__(self, tokens: Sequence[int], spans: Sequence[Span]) -> list[int]:
        """Returns the exclusive end of each step of one row, rising, inside its trained spans."""
        ...


class SplitByTurn:
    """Every trained span is a step: what the model said between two inputs."""

    def __call__(self, tokens: Sequence[int], spans: Sequence[Span]) -> list[int]:
        """Returns the ends of the spans."""
        return [end for _, end in spans]


class SplitByToken:
    """A step ends after each of some token ids.

    Args:
        token_ids: the ids.
        silent: ids that make no step by themselves, such as that of the end of a turn.
    """

    def __init__(self, token_ids: Collection[int], *, silent: Collection[int] = ()) -> None:
        self._ids = frozenset(token_ids)
        self._silent = self._ids | frozenset(silent)

    def __call__(self, tokens: Sequence[int], spans: Sequence[Span]) -> list[int]:
        """Returns the exclusive end of each step."""
        ends: list[int] = []
        for begin, end in spans:
            cuts = [at + 1 for at in range(begin, end) if tokens[at] in self._ids]
            ends += _joined(begin, [*cuts, end], lambda a, b: any(t not in self._silent for t in tokens[a:b]))
        return ends


class SplitByTag:
    """A step ends with the token in which a tag ends.

    Args:
        tokenizer: the one that made the row's tokens; see `TokenText`.
        tag: text, or a compiled pattern, whose matches end steps; `(?=Step \\d)` ends one before each.

    Raises:
        BadArgument: the tag is empty.
    """

    def __init__(self, tokenizer: Any, tag: str | re.Pattern[str]) -> None:
        if not (tag if isinstance(tag, str) else tag.pattern):
            raise BadArgument("an empty tag would end a step after each token", hint='such as "</step>"')
        self._text = TokenText(tokenizer)
        self._tag = re.compile(re.escape(tag)) if isinstance(tag, str) else tag

    def __call__(self, tokens: Sequence[int], spans: Sequence[Span]) -> list[int]:
        """Returns the exclusive end of each step."""
        ends: list[int] = []
        for begin, end in spans:
            ends += self._ends_in(tokens[begin:end], begin)
        return ends

    def _ends_in(self, tokens: Sequence[int], offset: int) -> list[int]:
        pieces = self._text.pieces(tokens)
        said = [
            "" if token in self._text.special_ids else piece
            for token, piece in zip(tokens, pieces, strict=True)
        ]
        text_ends = list(accumulate(map(len, pieces)))
        found = (match.end() for match in self._tag.finditer("".join(pieces)))
        cuts = [bisect_left(text_ends, at) + 1 for at in found if at]

        def has_text(begin: int, end: int) -> bool:
            return bool(self._tag.sub("", "".join(said[begin:end])).strip())

        return [offset + end for end in _joined(0, [*cuts, len(tokens)], has_text)]


def split_by_blank_line(tokenizer: Any) -> SplitByTag:
    """Returns a splitter whose steps end with a blank line."""
    return SplitByTag(tokenizer, re.compile(r"\n\s*\n"))


def _joined(begin: int, cuts: Sequence[int], has_content: Callable[[int, int], bool]) -> list[int]:
    """The ends of the steps between cuts, of which the last is the end of the span."""
    ends: list[int] = []
    for cut in cuts:
        if has_content(begin, cut):
            ends.append(cut)
        elif ends:
            ends[-1] = cut
        else:
            continue
        begin = cut
    return ends
