"""Samples episodes through Atropos' server manager, by token ids: `AtroposServer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmbridge.producers.rollout import Message, NoTokens, Sampled, Sampling, ServerFailed


class AtroposServer:
    """What `Episode` samples from, over the `server` of an Atropos environment.

    For one event loop; any number of tasks ask at once. Policy versions are not known here: the producer that
    runs the environment stamps them.

    Args:
        manager: an atroposlib ServerManager; its servers must be of the type "vllm" or "sglang".
        split: "train" or "eval": which of the servers' queues.
    """

    def __init__(self, manager: Any, split: str = "train") -> None:
        self._manager, self._split = manager, split

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, messages: Sequence[Message] = ()
    ) -> Sampled:
        """Returns one completion of `prompt`, with the log-probability of each token.

        Raises:
            NoTokens: the server is of a type without token ids, or sampled after another prompt.
            ServerFailed: it refused, or did not answer; Atropos asks three times.
        """
        try:
            answered = await self._manager.tokens_and_logprobs_completion(
                input_ids=list(prompt), n=1, split=self._split, **sampling.fields()
            )
        except Exception as error:  # of tenacity, aiohttp, or the server class
            cause = _last(error)
            if isinstance(cause, NotImplementedError):
                raise NoTokens(f"{cause}", hint='serve with server_type "vllm" or "sglang"') from error
            raise ServerFailed(f"Atropos' server: {cause!r}", hint="see the server's log") from error
        said, tokens, logprobs, reasons = answered
        if list(said) != list(prompt):
            raise NoTokens(
                f"the server sampled after {len(said)} tokens, not after the {len(prompt)} it was given",
                hint="a tokenizer that begins a text twice? Give its chat template one beginning",
            )
        if _reason(reasons[0]) == "error":
            raise ServerFailed("the server ended the answer with an error", hint="see the server's log")
        return Sampled(list(tokens[0]), list(logprobs[0]), [-1] * len(tokens[0]), _reason(reasons[0]))


def _last(error: BaseException) -> BaseException:
    """What Atropos' retries ended with."""
    attempt = getattr(error, "last_attempt", None)
    cause = attempt.exception() if attempt is not None else None
    return cause if cause is not None else error


def _reason(said: Any) -> Any:
    """A finish reason; SGLang's is an object with its type."""
    name = said.get("type") if isinstance(said, dict) else said
    return name if name in ("stop", "length", "abort", "error") else "stop"
