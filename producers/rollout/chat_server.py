"""A chat server without token ids, whose text is tokenised here: `ChatServer`. Such rows are guesses and
marked as such; they are for evaluation and supervised data, not for a policy gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from shmbridge.producers.rollout.chat_format import ChatFormat
from shmbridge.producers.rollout.http_server import HttpServer
from shmbridge.producers.rollout.sampling import FinishReason, Message, Sampled, Sampling, ServerFailed


class ChatServer:
    """Any server of OpenAI's `/v1/chat/completions`; no log-probabilities, no versions.

    For one event loop; any number of tasks ask at once.

    Args:
        url: address; `/v1/chat/completions` is added to it.
        chat: makes token ids of the text.
        options: of `HttpServer`: model, timeout_s, patience_s, headers.
    """

    def __init__(self, url: str, chat: ChatFormat, **options: Any) -> None:
        self.url, self._chat = url.rstrip("/"), chat
        self._http = HttpServer(url, api="completions", **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, messages: Sequence[Message] = ()
    ) -> Sampled:
        """Returns the answer to `messages`, tokenised; `prompt` is not sent. Raises ServerFailed."""
        body: dict[str, Any] = {
            "model": await self._http.model_name(),
            "messages": [dict(message) for message in messages],
            **sampling.fields(),
        }
        said = await self._http.ask("POST", "/v1/chat/completions", body)
        try:
            choice = said["choices"][0]
            text = choice["message"]["content"] or ""
            given = choice.get("finish_reason")
            reason: FinishReason = given if given in ("length", "abort") else "stop"
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ServerFailed(f"{self.url}: not a chat completion: {error!r}") from None
        if not isinstance(text, str):
            raise ServerFailed(f"{self.url}: the answer is no text: {text!r:.100}")
        if reason == "abort" and not text:  # before its first token
            return Sampled([], None, [], reason)
        tokens = self._chat.answer(text, ends=reason == "stop")
        if not tokens:
            raise ServerFailed(f"{self.url}: the answer is empty, and the tokenizer has no end token")
        return Sampled(tokens, None, [-1] * len(tokens), reason, text)
