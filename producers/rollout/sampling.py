"""One request to an inference server and its result: `Sampling` and `Sampled`, and what can go wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shmbridge import ShmBridgeError

FinishReason = Literal["stop", "length", "abort", "error"]  # shmbridge.schema.FINISH_REASONS
Message = Mapping[str, Any]  # role, content, and whatever the chat template knows besides


@dataclass(frozen=True)
class Sampling:
    """How a completion is sampled; the names are those of vLLM."""

    max_tokens: int | None = None  # None: what is left of the context
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # strings that end a completion; they stay in it
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # the server's own fields, sent as they are

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a request, without those that are not set. Never blocks."""
        wanted: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        for name in ("max_tokens", "seed"):
            if (value := getattr(self, name)) is not None:
                wanted[name] = value
        for name in ("stop", "stop_token_ids"):
            if values := getattr(self, name):
                wanted[name] = list(values)
        return {**wanted, **self.extra}


@dataclass(frozen=True)
class Sampled:
    """One completion.

    Attributes:
        token_ids: what was sampled, end token included; empty only if the server aborted it before.
        logprobs: the log-probability of each token in nats, NaN for one that the server could not give;
            None: it gave none at all.
        versions: the policy version of each token, -1 where the server does not say.
        finish_reason: why it ended.
        text: only from a server without tokens, whose `token_ids` were made from it; else None.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    versions: list[int]
    finish_reason: FinishReason
    text: str | None = None


class SampleServer(Protocol):
    """What an episode samples from."""

    async def sample(self, prompt: Sequence[int], sampling: Sampling, messages: Sequence[Message]) -> Sampled:
        """Returns one completion of `prompt`; `messages` are the same conversation for a server without
        tokens. Raises ServerFailed, NoTokens.
        """
        ...


class ServerFailed(ShmBridgeError, RuntimeError):
    """An inference server refused a request, or did not answer."""

    code = "SB507"


class NoTokens(ServerFailed):
    """An inference server gives no token ids, so that rows would be guesses."""

    code = "SB508"
