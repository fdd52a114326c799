"""The text of a row's response: its trained tokens decoded, or what the assistant says in its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.group_rows import Span
from shmbridge.producers.rollout import TokenText


def response_texts(
    group: Mapping[str, Any],
    tokens: Sequence[Sequence[int]],
    spans: Sequence[Sequence[Span]],
    text: TokenText | None,
) -> list[str]:
    """Returns the text of each row's response.

    With a tokenizer it is that of the trained tokens, special ones included, the turns one behind the other.
    Without, it is that of the assistant's `messages`, each on lines of its own.

    Raises:
        RewardsFailed: neither a tokenizer nor messages are at hand.
    """
    if text is not None:
        return [
            "".join(text.text(row[begin:end]) for begin, end in trained)
            for row, trained in zip(tokens, spans, strict=True)
        ]
    messages = group.get("messages")
    if not isinstance(messages, (list, tuple)) or len(messages) != len(tokens):
        raise RewardsFailed(
            "the text of the responses is not at hand: no tokenizer, and no messages, one list per row",
            hint="RewardBridge(config, tokenizer=the policy's), or put messages into the group",
        )
    return [_said(row, at) for at, row in enumerate(messages)]


def _said(messages: Any, row: int) -> str:
    if not isinstance(messages, (list, tuple)) or not all(isinstance(each, Mapping) for each in messages):
        raise RewardsFailed(
            f"row {row} has no messages, and there is no tokenizer: its text is not at hand",
            hint="RewardBridge(config, tokenizer=the policy's)",
        )
    return "\n".join(_content(each.get("content")) for each in messages if each.get("role") == "assistant")


def _content(content: Any) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
