"""From messages to token ids, without ever tokenising again what was sampled: `ChatFormat`.

Used by `episode.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmbridge.producers.rollout.sampling import Message
from shmbridge.producers.rollout.token_text import TokenText

_ANSWER = "shmbridge-answer"  # stands for the last answer where a template is asked what follows it


class ChatFormat:
    """Messages as the token ids that a model expects, by its tokenizer's chat template.

    Without a template, the texts of messages follow each other as they are. For one thread at a time.

    Args:
        tokenizer: a Hugging Face tokenizer, or the name or folder of one.
        template: another chat template than the tokenizer's.
        options: arguments of the template, such as `{"enable_thinking": False}`.
    """

    def __init__(
        self, tokenizer: Any, *, template: str | None = None, options: dict[str, Any] | None = None
    ) -> None:
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.tokenizer, self.token_text = tokenizer, TokenText(tokenizer)
        self._template = template or getattr(tokenizer, "chat_template", None)
        self._options = options or {}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a conversation up to where the model is to answer. Never blocks."""
        if self._template is None:
            return list(self.tokenizer.encode(_joined(messages)))
        return self._encoded(self._rendered(messages))

    def following(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Returns the token ids between a sampled answer and the next one: the end of the answer's turn where
        it was not sampled, then `messages`, then the beginning of the next turn. Never blocks.

        The template renders a stand-in for the answer, so that it cannot change what was sampled: some
        templates cut the reasoning out of earlier answers.
        """
        if self._template is None:
            return self._encoded(_joined(messages))
        mark = _ANSWER
        while any(mark in str(message.get("content")) for message in messages):
            mark += "-"
        stand_in = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
        tail = self._encoded(self._rendered([*stand_in, *messages]).split(mark)[-1])
        return tail[1:] if tail and sampled and tail[0] == sampled[-1] else tail

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of sampled tokens, without special ones. Never blocks."""
        return self.token_text.text(token_ids, special=False)

    def answer(self, text: str, *, ends: bool = True) -> list[int]:
        """Returns token ids for an answer that is known as text only: a guess. With the end token, unless the
        answer was cut: `ends=False`.
        """
        end = self.tokenizer.eos_token_id if ends else None
        return [*self._encoded(text), *([] if end is None else [end])]

    def _rendered(self, messages: Sequence[Message]) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self._template,
                **self._options,
            )
        )

    def _encoded(self, text: str) -> list[int]:
        # A template writes the special tokens itself.
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)
