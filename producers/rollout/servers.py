"""Inference servers asked over HTTP: `HttpServer` for token ids; `ChatServer` for text, tokenised here."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shmbridge.errors import BadArgument
from shmbridge.producers.rollout.episode import ChatFormat, ContextFull
from shmbridge.producers.rollout.sampling import (
    APIS,
    Api,
    FinishReason,
    Json,
    Message,
    NoTokens,
    Sampled,
    Sampling,
    ServerFailed,
)

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_CONNECT_S = 10.0
_SAID = 300  # characters of an error response that are shown
_AGAIN = (429, 502, 503, 504)  # busy, paused or starting


class HttpServer:
    """A server that samples from token ids, for one event loop; any number of tasks ask at once.

    It asks again while the server does not listen, or answers that it is busy, for `patience_s` seconds.

    Args:
        url: address, such as "http://127.0.0.1:9004"; a "/v1" at its end is left out.
        api: "generate" (the policy server), "vllm", "completions", "sglang", or "auto": ask the server.
        model: name of the model in requests; None: the first that the server lists.
        timeout_s: longest time for one completion.
        patience_s: how long a server that does not answer is asked again.
        headers: sent with each request, for example `Authorization`.
    """

    def __init__(
        self,
        url: str,
        *,
        api: str = "auto",
        model: str | None = None,
        timeout_s: float = 600.0,
        patience_s: float = 60.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        if api != "auto" and api not in APIS:
            raise ValueError(f"api={api!r} is not one of auto, {', '.join(APIS)}")
        if not url.startswith(("http://", "https://")):
            raise BadArgument(f"{url!r} is no address of a server", hint="such as http://127.0.0.1:9004")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model, self._patience_s = model, patience_s
        self._timeout_s, self._headers = timeout_s, headers
        self._api: Api | None = APIS.get(api)
        self._session: aiohttp.ClientSession | None = None
        self._card: Json | None = None  # what the server lists of its first model
        self._asking = asyncio.Lock()
        self._is_away = False  # and it was said

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def api(self) -> str | None:
        """What the server speaks; None: not yet asked."""
        return self._api.name if self._api is not None else None

    async def close(self) -> None:
        """Closes the connections; a later `sample` opens others."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, messages: Sequence[Message] = ()
    ) -> Sampled:
        """Returns one completion of the token ids `prompt`, with the log-probability of each token.

        It takes `sampling.max_tokens` at most, and what is left of the context that the server lists.

        Raises:
            ContextFull: nothing is left of it.
            BadArgument: no `max_tokens`, and the server lists no context.
            NoTokens: the server gives no token ids, or no log-probabilities.
            ServerFailed: it refused, did not answer in time, or answered in another form.
        """
        api = self._api or await self._find_api()
        tokens = list(prompt)
        sampling = replace(sampling, max_tokens=await self._most(len(tokens), sampling.max_tokens))
        body = await self.ask("POST", api.path, api.request(await self.model_name(), tokens, sampling))
        try:
            sampled = api.sampled(body, tokens)
        except ServerFailed as error:
            raise type(error)(f"{self.url}{api.path}: {error.message}", hint=error.hint) from None
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerFailed(
                f"{self.url}{api.path}: not the response of the API {api.name!r}: {error!r} in "
                f"{json.dumps(body)[:_SAID]}",
                hint="name the API of this server",
            ) from None
        if sampled.logprobs is None and sampled.token_ids:
            raise NoTokens(
                f"{self.url}{api.path}: the response has no log-probabilities",
                hint="start the server with log-probabilities, or allow rows without (--allow-retokenise)",
            )
        return sampled

    async def _most(self, prompt: int, wanted: int | None) -> int:
        """Tokens of an answer; servers that are not told how many answer with few."""
        context = (await self._listed()).get("max_model_len")
        if isinstance(context, int):
            if prompt >= context:
                raise ContextFull(
                    f"{prompt} tokens leave no room in the context of {context} of {self.url}",
                    hint="end the episode here, or serve with a longer context",
                )
            return min(context - prompt, wanted or context)
        if wanted is None:
            raise BadArgument(
                f"{self.url} does not list how long a context it takes",
                hint="say how long an answer or a row may be: max_tokens= or context=",
            )
        return wanted

    async def model_name(self) -> str:
        """Returns the model's name in requests; asks the server if none was given. Raises ServerFailed."""
        return self._model or str((await self._listed()).get("id") or "")

    async def _listed(self) -> Json:
        """What the server lists of its first model, asked once; nothing if it has no such list."""
        if self._card is None:
            status, said = await self.answered("GET", "/v1/models", None)
            listed = {} if status in (404, 405) else self._decoded("/v1/models", status, said)
            models = listed.get("data")
            first = models[0] if isinstance(models, list) and models else {}
            self._card = first if isinstance(first, dict) else {}
        return self._card

    async def _find_api(self) -> Api:
        """What the server lists of its models and routes decides; once."""
        async with self._asking:
            if self._api is not None:
                return self._api
            card = await self._listed()
            owner = card.get("owned_by")
            if owner == "shmbridge":
                found = "generate"
            elif owner == "sglang" or (not card and await self._exists("/get_model_info")):
                found = "sglang"
            else:
                routes = (
                    (await self.ask("GET", "/openapi.json")) if await self._exists("/openapi.json") else {}
                )
                found = "vllm" if APIS["vllm"].path in routes.get("paths", {}) else "completions"
            self._api = APIS[found]
            return self._api

    async def _exists(self, path: str) -> bool:
        status, _ = await self.answered("GET", path, None)
        return status == 200

    async def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Returns the JSON object that the server responds with. Raises ServerFailed."""
        return self._decoded(path, *await self.answered(method, path, body))

    def _decoded(self, path: str, status: int, said: bytes) -> Json:
        if status != 200:
            raise ServerFailed(
                f"{self.url}{path} answered {status}: {said[:_SAID].decode(errors='replace')}",
                hint="see the server's log",
            )
        try:
            decoded: Any = json.loads(said)
        except ValueError:
            decoded = None
        if isinstance(decoded, list) and len(decoded) == 1:
            decoded = decoded[0]
        if not isinstance(decoded, dict):
            raise ServerFailed(f"{self.url}{path} answered no JSON object: {said[:_SAID]!r}")
        return decoded

    async def answered(self, method: str, path: str, body: Json | bytes | None) -> tuple[int, bytes]:
        """Returns status and body of the server's response; asks again while it is busy or away.

        Args:
            body: JSON, or its bytes; None: no body.

        Raises ServerFailed: there is none.
        """
        import aiohttp

        session = self._open()
        content: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            content = {"data": body, "headers": {"Content-Type": "application/json"}}
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                async with session.request(method, self.url + path, **content) as response:
                    said = await response.read()
                    self._is_away = False
                    if response.status not in _AGAIN or time.monotonic() >= give_up:
                        return response.status, said
            except aiohttp.InvalidURL as error:
                raise ServerFailed(f"{error} is no address", hint="such as http://127.0.0.1:9004") from None
            except aiohttp.ServerTimeoutError:
                self._away(path, f"no connection within {_CONNECT_S:g} s", give_up)
            except TimeoutError:
                raise ServerFailed(
                    f"{self.url}{path} did not answer within {self._timeout_s:g} s",
                    hint="is it stopped or overloaded? A longer timeout_s waits longer",
                ) from None
            except aiohttp.ClientError as error:
                self._away(path, str(error) or type(error).__name__, give_up)
            await asyncio.sleep(_RETRY_S)

    def _away(self, path: str, why: str, give_up: float) -> None:
        """Says once that the server is away. Raises ServerFailed if it is time to give up."""
        if time.monotonic() >= give_up:
            raise ServerFailed(
                f"{self.url}{path}: {why} (asked again for {self._patience_s:g} s)",
                hint="is the server running?",
            ) from None
        if not self._is_away:
            log.warning("%s%s: %s; asking again for %g s", self.url, path, why, self._patience_s)
        self._is_away = True

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S),
                headers=self._headers,
            )
        return self._session


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
