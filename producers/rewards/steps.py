"""Where the steps of a row end: after a tag, a blank line, a token, or a turn; as indices of its own tokens.

Ends are exclusive, count from the row's first token, rise, and lie in trained spans. What is left of a span
after the last tag is a step, too. A step without any text joins the one before it in its span, or, as the
first, the one after it; a span without any text has no step.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, Protocol

from shmbridge.errors import BadArgument
from shmbridge.producers.rewards.group_rows import Span
from shmbridge.producers.rollout import TokenText


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
