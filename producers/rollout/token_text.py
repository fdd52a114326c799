"""Which text each token of a row adds: decoded from the row's own ids, never tokenised again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

_INCOMPLETE = "\ufffd"  # what decoders write for a part of a character


class TokenText:
    """Decodes the ids of one tokenizer. Any thread; it remembers the text of each id it has met.

    Args:
        tokenizer: has `decode(ids, skip_special_tokens=, clean_up_tokenization_spaces=)`, as those of
            transformers do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._anchor: int | None = None
        self._after: dict[tuple[int, int, bool], str] = {}  # what a token adds after an anchor

    def text(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Returns the text of tokens, that of special ones included if `special`. Never blocks."""
        decoded: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return decoded

    def pieces(self, tokens: Sequence[int], *, special: bool = True) -> list[str]:
        """Returns what each token adds to `text` of the same arguments; joined, they are that text.

        The bytes of a character may be spread over tokens: the last of these adds it, the others add "".
        Never blocks.
        """
        if not tokens:
            return []
        whole, pieces = self.text(tokens, special=special), self._in_windows(tokens, special)
        # what a token adds may depend on more than the window: then by decoding from the start, which is slow
        return pieces if "".join(pieces) == whole else list(self._from_the_start(tokens, special, whole))

    def ends(self, tokens: Sequence[int], *, special: bool = True) -> list[int]:
        """Returns how many characters `text` of the same arguments has after each token. Never blocks."""
        return list(accumulate(map(len, self.pieces(tokens, special=special))))

    def _in_windows(self, tokens: Sequence[int], special: bool) -> list[str]:
        """Decodes as few tokens together as make whole characters, each time after an ordinary token: some
        tokenizers drop a space at the beginning.
        """
        pieces: list[str] = []
        begin, anchor = 0, self._anchor_in(tokens)
        for at in range(len(tokens)):
            window = tokens[begin : at + 1]
            added = self._added(anchor, window, special) if begin else self.text(window, special=special)
            if at + 1 == len(tokens) or (added and not added.endswith(_INCOMPLETE)):
                pieces.append(added)
                begin = at + 1
            else:
                pieces.append("")
        return pieces

    def _anchor_in(self, tokens: Sequence[int]) -> int:
        if self._anchor is None:
            self._anchor = next((each for each in tokens if self._is_ordinary(each)), None)
        return tokens[0] if self._anchor is None else self._anchor

    def _added(self, anchor: int, window: Sequence[int], special: bool) -> str:
        """What tokens add after the anchor."""
        key = anchor, window[0], special
        if len(window) == 1 and key in self._after:
            return self._after[key]
        added = self.text([anchor, *window], special=special)[len(self.text([anchor], special=special)) :]
        return self._after.setdefault(key, added) if len(window) == 1 else added

    def _is_ordinary(self, token: int) -> bool:
        text = self.text([token], special=False)
        return bool(text.strip()) and _INCOMPLETE not in text

    def _from_the_start(self, tokens: Sequence[int], special: bool, whole: str) -> Iterator[str]:
        reached = 0
        for count in range(1, len(tokens) + 1):
            text = self.text(tokens[:count], special=special)
            end = max(reached, len(text)) if whole.startswith(text) else reached
            yield whole[reached:end]
            reached = end
