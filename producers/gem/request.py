"""One completion that an Atropos environment asks for: `Request`, and what of it is new: `Turn`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shmbridge.producers.rollout import Message


@dataclass(frozen=True)
class Request:
    """What an environment asks for.

    Attributes:
        messages: the conversation, where it asks with messages.
        prompt: the text to be continued, where it asks with text, or its managed server made it of messages.
        token_ids: the same as token ids, where it has them.
        wants_tokens: it is given the token ids of the answer.
        wants_logprobs: it asks for the log-probability of each token.
        options: all else that it asks, such as max_tokens and temperature.
    """

    messages: Sequence[Message] | None = None
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    wants_tokens: bool = False
    wants_logprobs: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What a request says after the answer before it.

    Attributes:
        new_messages: the messages since then; those of the answer itself are left out.
        rewritten: the request is no continuation of that conversation: its messages are then all new.
    """

    new_messages: list[Message]
    rewritten: bool = False

    @property
    def observation(self) -> str:
        """The text of the new messages."""
        return "\n\n".join(text_of(message) for message in self.new_messages)


def turn_of(request: Request, before: Request | None, answer: str) -> Turn:
    """Returns what is new in `request`, after `answer` to the request `before`; None: it is the first one."""
    if request.messages is not None:
        asked = before.messages if before is not None else ()
        return _chat_turn(request.messages, asked, answer)
    prompt = request.prompt or ""
    if before is None:
        return Turn(_as_user(prompt))
    said = (before.prompt or "") + answer
    if before.prompt is None or not prompt.startswith(said):
        return Turn(_as_user(prompt), rewritten=True)
    return Turn(_as_user(prompt[len(said) :]))


def _chat_turn(messages: Sequence[Message], asked: Sequence[Message] | None, answer: str) -> Turn:
    if not asked:
        return Turn(list(messages), rewritten=asked is None)
    new = list(messages[len(asked) :])
    said = bool(new) and new[0].get("role") == "assistant"
    if list(messages[: len(asked)]) != list(asked) or len(new) <= said:
        return Turn(list(messages), rewritten=True)
    return Turn(new[1:], rewritten=new[0].get("content") != answer) if said else Turn(new)


def continues(request: Request, before: Request | None, said: Sequence[str]) -> bool:
    """Returns whether a request goes on with the conversation `before`, with all that was said in it.

    An environment may trim an answer, add to it, or leave its thoughts out.
    """
    if before is None:
        return False
    text, asked = _whole(request), _whole(before)
    if request.messages is not None and before.messages:
        if list(request.messages[:1]) != list(before.messages[:1]):
            return False
    elif before.prompt and text[:32] != asked[:32]:
        return False
    at = 0
    for answer in said:
        answer = without_thoughts(answer)
        found = text.find(answer, at)
        if found < 0:
            return False
        at = found + len(answer)
    return True


def goes_on_exactly(request: Request, before: Request | None, said: str, thoughts: bool = True) -> bool:
    """Returns whether a request is the one `before`, the answer to it, and what is new.

    Args:
        request: the newer one.
        before: the older one.
        said: the answer.
        thoughts: False: the answer may be there without its thoughts.
    """
    if before is None:
        return False
    if request.messages is None or before.messages is None:
        return before.prompt is not None and (request.prompt or "").startswith(before.prompt + said)
    asked = len(before.messages)
    if len(request.messages) <= asked or list(request.messages[:asked]) != list(before.messages):
        return False
    answer = request.messages[asked]
    if answer.get("role") != "assistant":
        return False
    there = text_of(answer)
    return there.strip() == said.strip() if thoughts else without_thoughts(there) == without_thoughts(said)


def without_thoughts(answer: str) -> str:
    """Returns an answer as templates keep it in a later conversation, stripped."""
    return answer.rpartition("</think>")[2].strip() or answer.strip()


def quotes(request: Request, before: Request | None, answer: str) -> bool:
    """Returns whether a request shows an answer as somebody else's words, in another conversation.

    So a judge is asked, and a model that gets a summary.
    """
    answer = answer.strip()
    if not answer or before is None or before.messages is None or request.messages is None:
        return False
    if list(request.messages[: len(before.messages)]) == list(before.messages):
        return False
    return any(each.get("role") != "assistant" and answer in text_of(each) for each in request.messages)


def _whole(request: Request) -> str:
    if request.messages is not None:
        return "\n".join(text_of(message) for message in request.messages)
    return request.prompt or ""


def _as_user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def text_of(message: Message) -> str:
    """Returns a message's text, also of content that is a list of parts; parts without text are left out."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
