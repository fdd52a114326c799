"""The text of each token, so that the texts of a row put together are the row's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PARTIAL = "\ufffd"  # what a tokenizer writes for a token that is part of a character


class TokenTexts:
    """Texts of token ids, remembered per id. One thread; never blocks.

    Args:
        tokenizer: with `decode`, such as a Hugging Face tokenizer; None: every text is the id, as "<17>".
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Returns one text per id. The last token of a character split over tokens has the character."""
        found = [self._text(each) for each in ids]
        begin = 0
        while begin < len(found):
            end = begin
            while end < len(found) and _PARTIAL in found[end]:
                end += 1
            if end > begin + 1:
                found[begin:end] = self._split(ids[begin:end])
            begin = max(end, begin + 1)
        return found

    def _text(self, token: int) -> str:
        if token not in self._known:
            # some tokenizers drop the space before the first token of a text, but not before the second
            once = self._decoded([token])
            self._known[token] = self._decoded([token, token])[len(once) :] or once
        return self._known[token]

    def _split(self, ids: Sequence[int]) -> list[str]:
        """Returns texts of tokens that are parts of characters: each character stands at its last token."""
        texts, begin = [""] * len(ids), 0
        for place in range(len(ids)):
            text = self._decoded(list(ids[begin : place + 1]))
            if _PARTIAL not in text:
                texts[place], begin = text, place + 1
        if begin < len(ids):
            texts[-1] = self._decoded(list(ids[begin:]))
        return texts

    def _decoded(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"<{each}>" for each in ids)
        try:
            return str(
                self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
        except Exception:  # an id that the tokenizer lacks; a tokenizer may raise anything
            return "".join(f"<{each}>" for each in ids)
