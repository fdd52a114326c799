"""What a policy says in one turn: `Action`, and the `Answer` that an Atropos environment is given for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shmbridge.errors import BadArgument
from shmbridge.producers.gem.request import Request

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Action:
    """An answer with the tokens that were sampled, for `AtroposGemEnv.step`. Plain text is an action, too.

    Attributes:
        text: what was said; None: decoded from the tokens.
        token_ids: what was sampled, end token included.
        logprobs: the log-probability of each token, in nats.
        finish_reason: "length" if the answer was cut.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    finish_reason: FinishReason = "stop"

    def __post_init__(self) -> None:
        if self.text is None and self.token_ids is None:
            raise BadArgument(
                "an action has neither text nor token ids", hint="Action(text, token_ids, logprobs)"
            )
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids or ()):
            raise BadArgument(
                f"{len(self.logprobs)} log-probabilities for {len(self.token_ids or ())} tokens",
                hint="give one for each token, end token included",
            )


@dataclass(frozen=True)
class Answer:
    """An action with all that the environment asked for.

    Attributes:
        text: what was said.
        token_ids: None where neither the action has them nor the environment wants them.
        logprobs: None: not known.
        finish_reason: as the action's.
        retokenised: whether the tokens were made from the text.
    """

    text: str
    token_ids: list[int] | None
    logprobs: list[float] | None
    finish_reason: FinishReason
    retokenised: bool


@dataclass(frozen=True)
class Spoken:
    """What one sibling was asked last, and all that it has answered."""

    request: Request | None
    answers: Sequence[Answer]

    @property
    def conversation(self) -> tuple[Any, ...]:
        """What is equal where two siblings said the same in the same conversation."""
        asked = self.request
        texts = [each.text for each in self.answers]
        return (None, None, texts) if asked is None else (asked.messages, asked.prompt, texts)


def answer_of(action: str | Action, request: Request, tokenizer: Any) -> Answer:
    """Returns the answer to a request. Never blocks.

    An environment that wants tokens of an action that is only text gets that text tokenised, end token
    included unless the answer was cut. Plain text may end with the text of the end token.

    Raises:
        BadArgument: no action, or the environment asks for log-probabilities and the action has none.
    """
    if isinstance(action, str):
        action = Action(action.removesuffix(tokenizer.eos_token or ""))
    if not isinstance(action, Action):
        raise BadArgument(f"a {type(action).__name__} is no action", hint="give text, or an Action")
    if request.wants_logprobs and action.logprobs is None:
        raise BadArgument(
            "the environment asks for the log-probabilities of its completion, and the action has none",
            hint="step(Action(text, token_ids, logprobs))",
        )
    text = action.text
    if text is None:
        text = str(tokenizer.decode(list(action.token_ids or ()), skip_special_tokens=True))
    tokens = None if action.token_ids is None else [int(each) for each in action.token_ids]
    retokenised = tokens is None and request.wants_tokens
    if retokenised:
        tokens = list(tokenizer.encode(text, add_special_tokens=False))
        if action.finish_reason == "stop" and tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
    logprobs = None if action.logprobs is None else [float(each) for each in action.logprobs]
    return Answer(text, tokens, logprobs, action.finish_reason, retokenised)
