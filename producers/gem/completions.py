"""The inference server of an Atropos environment whose completions are a policy's actions: `AskingServer`.

It stands in the place of `env.server` of one environment object and answers in the forms of atroposlib 0.4:
`ServerManager` (envs/server_handling/server_manager.py) and its managed servers.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from atroposlib.envs.server_handling.managed_server import ManagedServer
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs

from shmbridge.errors import BadArgument
from shmbridge.producers.gem.turns import EPISODE, Answer, NotSuspendable, Request
from shmbridge.producers.rollout import Message

# Whether a completion that is asked for now is a judge's; tasks that an environment makes inherit it.
JUDGING: contextvars.ContextVar[str | None] = contextvars.ContextVar("shmbridge_gem_judging", default=None)

HINT = "judge={'base_url': URL, 'model_name': NAME} answers it"

NO_LOGPROB = float("nan")  # in place of one that an action did not have, until the episode is over
Tokens = tuple[list[int], list[list[int]], list[list[float]], list[str]]
_messages: contextvars.ContextVar[Sequence[Message] | None] = contextvars.ContextVar("messages", default=None)


def tell_apart(env: Any, names: Sequence[str] | None) -> None:
    """Marks what the methods of one environment object ask as a judge's. Never blocks.

    Args:
        env: the environment; its class is not changed.
        names: of the methods; None: `score`, and each of the environment's own whose name has "judge" in it.

    Raises:
        BadArgument: it has no such method.
    """
    for name in _judges(type(env)) if names is None else names:
        method = getattr(env, name, None)
        if not inspect.iscoroutinefunction(method):
            raise BadArgument(
                f"{type(env).__name__} has no coroutine method {name}", hint="judge_calls=(method names)"
            )
        setattr(env, name, _judging(method, name))


def _judges(kind: type[Any]) -> list[str]:
    from atroposlib.envs.base import BaseEnv

    own = {
        name for each in kind.__mro__ if each not in BaseEnv.__mro__ for name, value in vars(each).items()
        if inspect.iscoroutinefunction(value)
    }  # fmt: skip
    return sorted(name for name in own if name == "score" or "judge" in name.lower())


def _judging(method: Any, name: str) -> Any:
    @functools.wraps(method)
    async def asked(*args: Any, **kwargs: Any) -> Any:
        before = JUDGING.set(name)
        try:
            return await method(*args, **kwargs)
        finally:
            JUDGING.reset(before)

    return asked


class Judge:
    """A model that answers a judge's completions: any server of Atropos' own client.

    Args:
        config: fields of atroposlib's `APIServerConfig`: `base_url`, `model_name`, `api_key` and others.

    Raises:
        BadArgument: no such field.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        from atroposlib.envs.server_handling.server_baseline import APIServerConfig

        unknown = sorted(set(config) - set(APIServerConfig.model_fields))
        if unknown or not config.get("base_url") or not config.get("model_name"):
            raise BadArgument(
                f"judge={dict(config)!r} is no server: "
                + (f"no field {unknown}" if unknown else "no address"),
                hint="judge={'base_url': 'http://127.0.0.1:8000/v1', 'model_name': NAME}",
            )
        self._config = APIServerConfig(**{"api_key": "x", "health_check": False, **config})
        self._server: Any = None

    @property
    def server(self) -> Any:
        """Atropos' own client of it; made at first use, in the event loop where it is used."""
        if self._server is None:
            from atroposlib.envs.server_handling.server_manager import ServerManager

            self._server = ServerManager([self._config], slurm=False, testing=False)
        return self._server


class AskingServer:
    """Asks the episode that is running for each completion. Used by environments, in their event loop.

    Args:
        tokenizer: of the environment.
        model_name: as the environment may look it up in `server.servers[0].config`.
        outside: told of a completion that is asked for outside of any episode.
        tool_parser: name of vLLM's parser of tool calls for managed servers.
        judge: answers a judge's completions; None: they are refused.
    """

    def __init__(
        self,
        tokenizer: Any,
        model_name: str,
        outside: Callable[[BaseException], None],
        tool_parser: str | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.tokenizer, self._judge = tokenizer, judge
        self.tool_parser = tool_parser
        self._outside = outside
        self.config = SimpleNamespace(model_name=model_name, base_url=None, server_type="vllm")
        self.server_healthy, self.max_n_completions, self.reasoning_config = True, 1, None
        self.servers = [self]

    async def chat_completion(self, **asked: Any) -> ChatCompletion:
        """Returns the answer to `messages`."""
        if (judge := self._of_a_judge()) is not None:
            judged: ChatCompletion = await judge.chat_completion(**asked)
            return judged
        wants_logprobs = bool(asked.get("logprobs"))
        request = Request(
            messages=list(asked.pop("messages")),
            wants_tokens=wants_logprobs,
            wants_logprobs=wants_logprobs,
            options=_options(asked),
        )
        answer = await self._ask(request, asked)
        choices = [self._chat_choice(at, each, request) for at, each in enumerate(answer)]
        return ChatCompletion(
            id=_id(),
            created=int(time.time()),
            model=self.config.model_name,
            object="chat.completion",
            choices=choices,
        )

    async def completion(self, **asked: Any) -> Completion:
        """Returns what follows `prompt`."""
        if (judge := self._of_a_judge()) is not None:
            judged: Completion = await judge.completion(**asked)
            return judged
        wants_logprobs = asked.get("logprobs") not in (None, False)
        request = Request(
            prompt=self._text(asked.pop("prompt")),
            wants_tokens=wants_logprobs,
            wants_logprobs=wants_logprobs,
            options=_options(asked),
        )
        answer = await self._ask(request, asked)
        choices = [self._choice(at, each, request) for at, each in enumerate(answer)]
        return Completion(
            id=_id(),
            created=int(time.time()),
            model=self.config.model_name,
            object="text_completion",
            choices=choices,
        )

    async def tokens_and_logprobs_completion(self, **asked: Any) -> Tokens:
        """Returns the prompt's token ids; each answer's token ids, log-probabilities and finish reason."""
        return await self.tokens(asked, wants_logprobs=True)

    async def tokens(self, asked: dict[str, Any], wants_logprobs: bool) -> Tokens:
        """The same, with NO_LOGPROB for an action without log-probabilities if they are not insisted on."""
        if (judge := self._of_a_judge()) is not None:
            judged: Tokens = await judge.tokens_and_logprobs_completion(**asked)
            return judged
        prompt, ids = asked.pop("prompt", None), asked.pop("input_ids", None)
        text = None if prompt is None else self._text(prompt)
        ids = self._prompt_ids(text if ids is None else list(ids))
        request = Request(
            messages=_messages.get(),
            prompt=text,
            token_ids=ids,
            wants_tokens=True,
            wants_logprobs=wants_logprobs,
            options=_options(asked),
        )
        answers = await self._ask(request, asked)
        tokens = [each.token_ids or [] for each in answers]
        logprobs = [
            each.logprobs if each.logprobs is not None else [NO_LOGPROB] * len(each.token_ids or ())
            for each in answers
        ]
        return ids, tokens, logprobs, [each.finish_reason for each in answers]

    async def get_logprobs(self, **asked: Any) -> dict[str, Any]:
        """Raises NotSuspendable: only a model knows the log-probabilities of a prompt."""
        error = NotSuspendable("the environment asks for the log-probabilities of a prompt, as of a teacher")
        self._fail(error)
        raise error

    @asynccontextmanager
    async def managed_server(
        self, tokenizer: Any = None, base_url: str | None = None, preserve_think_blocks: bool = False
    ) -> AsyncIterator[ManagedServer]:
        """Atropos' own ManagedServer, which keeps tokens, masks and log-probabilities."""
        managed = _Managed(
            server=_Backend(self),
            tokenizer=tokenizer or self.tokenizer,
            tool_parser=self.tool_parser,
            preserve_think_blocks=preserve_think_blocks,
        )
        try:
            yield managed
        finally:
            managed.reset()

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[AskingServer]:
        """This server: it is one for all."""
        yield self

    async def update_weight(self, weight: float) -> None:
        """Nothing: there are no other servers to share requests with."""

    async def wait_for_sem(self, is_training: bool) -> None:
        """Nothing: an episode asks one completion at a time."""

    async def wandb_metrics(self, metrics: dict[str, Any] | None, name: str | None) -> dict[str, Any]:
        """Returns the metrics as they are."""
        return metrics or {}

    async def _ask(self, request: Request, asked: Mapping[str, Any]) -> list[Answer]:
        episode = EPISODE.get(None)
        if episode is None:
            error = NotSuspendable(
                "the environment asks for a completion outside of an episode",
                hint="in setup, get_next_item, or a task for all episodes; that needs a real server",
            )
            self._outside(error)
            raise error
        return await episode.ask(request, int(asked.get("n") or 1))

    def _of_a_judge(self) -> Any:
        """Returns who answers a judge's completion; None: it is the policy's turn. Raises NotSuspendable."""
        name = JUDGING.get()
        if name is None:
            return None
        if self._judge is None:
            error = NotSuspendable(f"the environment asks a judge, in {name}", hint=HINT)
            self._fail(error)
            raise error
        return self._judge.server

    def _fail(self, error: BaseException) -> None:
        episode = EPISODE.get(None)
        (self._outside if episode is None else episode.fail)(error)

    def _text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, (list, tuple)) and all(isinstance(each, int) for each in prompt):
            return str(self.tokenizer.decode(list(prompt)))
        error = NotSuspendable(f"the environment asks for {len(prompt)} prompts at once")
        self._fail(error)
        raise error

    def _prompt_ids(self, prompt: str | list[int] | None) -> list[int]:
        """As VLLMServer has it: a template's own first token is not doubled."""
        ids = prompt if isinstance(prompt, list) else list(self.tokenizer.encode(prompt or ""))
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id else ids

    def _chat_choice(self, at: int, answer: Answer, request: Request) -> Choice:
        content = [
            ChatCompletionTokenLogprob(token=token, logprob=logprob, top_logprobs=[])
            for token, logprob in self._pairs(answer)
        ]
        return Choice(
            index=at,
            finish_reason=answer.finish_reason,
            message=ChatCompletionMessage(role="assistant", content=answer.text),
            logprobs=ChoiceLogprobs(content=content) if request.wants_logprobs else None,
        )

    def _choice(self, at: int, answer: Answer, request: Request) -> CompletionChoice:
        pairs = self._pairs(answer)
        logprobs = Logprobs(
            tokens=[token for token, _ in pairs], token_logprobs=[value for _, value in pairs]
        )
        return CompletionChoice(
            index=at,
            finish_reason=answer.finish_reason,
            text=answer.text,
            logprobs=logprobs if request.wants_logprobs else None,
        )

    def _pairs(self, answer: Answer) -> list[tuple[str, float]]:
        tokens = self.tokenizer.convert_ids_to_tokens(answer.token_ids or [])
        return list(zip(tokens, answer.logprobs or (), strict=False))


class _Backend:
    """What a managed server asks: tokens, whose log-probabilities may be absent."""

    def __init__(self, server: AskingServer) -> None:
        self._server = server
        self.config, self.tokenizer = server.config, server.tokenizer

    async def tokens_and_logprobs_completion(self, **asked: Any) -> Tokens:
        """As of `AskingServer`."""
        return await self._server.tokens(asked, wants_logprobs=False)

    async def get_logprobs(self, **asked: Any) -> dict[str, Any]:
        """As of `AskingServer`."""
        return await self._server.get_logprobs(**asked)


class _Managed(ManagedServer):
    """Upstream's, which says besides what messages its prompt was made of."""

    async def chat_completion(self, **asked: Any) -> ChatCompletion:
        """As upstream's."""
        before = _messages.set(list(asked.get("messages") or ()))
        try:
            said: ChatCompletion = await super().chat_completion(**asked)
            return said
        finally:
            _messages.reset(before)


def _options(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in ("n", "model", "split")}


def _id() -> str:
    return f"shmbridge-{uuid.uuid4().hex}"
