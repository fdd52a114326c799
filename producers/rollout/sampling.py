"""Requests to inference servers and their responses: `Sampling`, `Sampled`, `APIS`, and what can go wrong.

`APIS` has the request body of each API by which servers sample from token ids, and reads its response.
Sources: vLLM 0.32 (`entrypoints/scale_out/token_in_token_out/protocol.py`,
`entrypoints/openai/completion/protocol.py`), SGLang's native `/generate`, the policy server's `/generate`.

`completions_in` reads the policy versions in any response: `/generate` as
vLLM has it for Atropos, with `weight_versions`; `/inference/v1/generate` of vLLM itself; the OpenAI API, with
`weight_version` and `oldest_weight_version`, which `/generate` also has before vLLM 0.32; SGLang's. It never
raises, for any response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from shmbridge import ShmBridgeError
from shmbridge.put import token_array

FinishReason = Literal["stop", "length", "abort", "error"]  # shmbridge.schema.FINISH_REASONS
Message = Mapping[str, Any]  # role, content, and whatever the chat template knows besides

Tokens: TypeAlias = npt.NDArray[np.int32]
Span: TypeAlias = tuple[int, int, int]  # version, and the output tokens [start, end) that it sampled
_END_OF_INT32 = 1 << 31
Json = dict[str, Any]
_WITH_LOGPROBS = "start the server with log-probabilities, or allow rows without (--allow-retokenise)"


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


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled sequence, and its server's statements about it; None: not given."""

    prompt: Tokens | None = None
    output: Tokens | None = None
    spans: tuple[Span, ...] = ()  # in order, without overlap; tokens between them are of unknown version
    oldest: int | None = None  # no token is older
    newest: int | None = None  # no token is newer
    text: str | None = None  # an environment that gets no tokens may tokenise it
    contradicts: bool = False  # the spans overlap, or end after the completion: none is believed


UNKNOWN = Completion()


def completions_in(body: Any) -> list[Completion]:
    """Returns the completions of a decoded body, or of an object with its fields as attributes.

    A body of an unknown form gives one completion of which nothing is known. Completions without tokens are
    left out, and so are scores of prompts.
    """
    if isinstance(body, (list, tuple)):
        return [_of_sglang(each) if isinstance(each, Mapping) else UNKNOWN for each in body]
    if isinstance(choices := _field(body, "choices"), (list, tuple)):
        return _of_choices(body, choices)
    if not isinstance(body, Mapping):
        return [UNKNOWN]
    return [_of_sglang(body)] if "meta_info" in body else _of_generate(body)


# --- forms ------------------------------------------------------------------------------------------------


def _of_generate(body: Mapping[str, Any]) -> list[Completion]:
    if body.get("prompt_logprobs") is not None:
        return []
    outputs, said = body.get("token_ids"), body.get("weight_versions")
    if not isinstance(outputs, (list, tuple)):
        return [UNKNOWN]
    oldest, newest = _bounds(body)
    prompt = token_array(body.get("prompt_token_ids"))
    if not isinstance(said, (list, tuple)):
        said = [None] * len(outputs)
    if len(said) != len(outputs):
        return [Completion(contradicts=True) for _ in outputs]
    each = zip(outputs, said, strict=True)
    return _with_tokens([_completion(prompt, output, spans, oldest, newest) for output, spans in each])


def _of_choices(body: Any, choices: list[Any] | tuple[Any, ...]) -> list[Completion]:
    oldest, newest = _bounds(body)
    shared = token_array(_field(body, "prompt_token_ids"))
    completions = []
    for choice in choices:
        prompt = shared if shared is not None else token_array(_field(choice, "prompt_token_ids"))
        completion = _completion(
            prompt, _field(choice, "token_ids"), _field(choice, "weight_versions"), oldest, newest
        )
        completions.append(replace(completion, text=_text(choice)))
    return _with_tokens(completions)


def _of_sglang(body: Mapping[str, Any]) -> Completion:
    """SGLang names the version at the end only, and none for tokens sampled before an update."""
    return Completion(newest=_version(_field(body.get("meta_info"), "weight_version")))


def _with_tokens(completions: list[Completion]) -> list[Completion]:
    return [completion for completion in completions if completion.output is None or len(completion.output)]


# --- parts ------------------------------------------------------------------------------------------------


def _bounds(body: Any) -> tuple[int | None, int | None]:
    oldest, newest = _version(_field(body, "oldest_weight_version")), _version(_field(body, "weight_version"))
    if newest is None:
        newest = _version(_field(_field(body, "metadata"), "weight_version"))  # SGLang's place for it
    if oldest is not None and newest is not None:
        return min(oldest, newest), max(oldest, newest)  # a learner may go back to a checkpoint
    return oldest, newest


def _completion(
    prompt: Tokens | None, output: Any, said: Any, oldest: int | None, newest: int | None
) -> Completion:
    tokens = token_array(output)
    if said is None:
        whole = tokens is not None and oldest is not None and oldest == newest
        spans = ((oldest, 0, len(tokens)),) if whole and tokens is not None and oldest is not None else ()
        return Completion(prompt, tokens, spans, oldest, newest)
    if tokens is None:
        return Completion(prompt, None, (), oldest, newest)
    checked = _spans(said, len(tokens))
    if checked is None:
        return Completion(prompt, tokens, contradicts=True)
    if sum(end - start for _, start, end in checked) < len(tokens):
        return Completion(prompt, tokens, checked, oldest, newest)
    versions = [version for version, _, _ in checked]
    return Completion(prompt, tokens, checked, min(versions, default=None), max(versions, default=None))


def _spans(said: Any, length: int) -> tuple[Span, ...] | None:
    """Returns the spans of known versions; None if they cannot all be true."""
    if not isinstance(said, (list, tuple)):
        return None
    spans: list[Span] = []
    reached = 0
    for each in said:
        start, end = _field(each, "start"), _field(each, "end")
        if not (_is_index(start) and _is_index(end) and reached <= start <= end <= length):
            return None
        reached = end
        if (version := _version(_field(each, "version"))) is not None and end > start:
            spans.append((version, start, end))
    return tuple(spans)


def _text(choice: Any) -> str | None:
    """Returns all text of a choice; None if it has no field for text."""
    message = _field(choice, "message")
    if message is None:
        text = _field(choice, "text")
        return text if isinstance(text, str) else None
    calls = _field(message, "tool_calls")
    functions = [_field(call, "function") for call in calls] if isinstance(calls, (list, tuple)) else []
    parts = [_field(message, name) for name in ("reasoning_content", "reasoning", "content")]
    parts += [_field(function, name) for function in functions for name in ("name", "arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def _field(owner: Any, name: str) -> Any:
    """Returns a field of decoded JSON, or of an object that a client library made of it."""
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _version(said: Any) -> int | None:
    """Versions are numbers, or text of digits; anything else, such as vLLM's "default", is unknown."""
    if isinstance(said, str) and said.isascii() and said.isdigit() and len(said) <= 10:
        said = int(said)
    return said if _is_index(said) and said < _END_OF_INT32 else None


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class Api:
    """One API of a server.

    Attributes:
        name: what users call it.
        path: of the requests.
        request: makes the body of a request for one completion, with the log-probability of each token.
        sampled: reads the completion of a response to a prompt. Raises NoTokens, ServerFailed, and KeyError
            or the like for a response of another form.
    """

    name: str
    path: str
    request: Callable[[str, list[int], Sampling], Json]
    sampled: Callable[[Json, list[int]], Sampled]


# --- /generate of the policy server, the form in which Atropos asks vLLM: versions token by token -----------


def _generate_request(model: str, prompt: list[int], sampling: Sampling) -> Json:
    return {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, **sampling.fields()}


def _generate_sampled(body: Json, prompt: list[int]) -> Sampled:
    tokens = _token_ids(body["token_ids"][0], body.get("prompt_token_ids"), prompt)
    entries = [each[0] for each in body["logprobs"][0]]
    logprobs = [entry[str(token)] for entry, token in zip(entries, tokens, strict=True)]
    return _sampled(body, tokens, logprobs, body["finish_reasons"][0])


# --- /inference/v1/generate of vLLM (`vllm serve --enable-scale-out`): versions token by token --------------


def _vllm_request(model: str, prompt: list[int], sampling: Sampling) -> Json:
    return {"model": model, "token_ids": prompt, "sampling_params": {"logprobs": 0, **sampling.fields()}}


def _vllm_sampled(body: Json, prompt: list[int]) -> Sampled:
    choice = body["choices"][0]
    tokens = _token_ids(choice.get("token_ids"), None, prompt)
    content = (choice.get("logprobs") or {}).get("content")
    logprobs = None if content is None else [each["logprob"] for each in content]
    return _sampled(body, tokens, logprobs, choice["finish_reason"])


# --- /v1/completions with return_token_ids, as vLLM has it: versions where the server says them -------------


def _completions_request(model: str, prompt: list[int], sampling: Sampling) -> Json:
    return {"model": model, "prompt": prompt, "logprobs": 0, "return_token_ids": True, **sampling.fields()}


def _completions_sampled(body: Json, prompt: list[int]) -> Sampled:
    choice = body["choices"][0]
    tokens = _token_ids(choice.get("token_ids"), choice.get("prompt_token_ids"), prompt)
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    return _sampled(body, tokens, logprobs, choice["finish_reason"])


# --- /generate of SGLang: it says the newest version of a completion, not that of each token ----------------


def _sglang_request(model: str, prompt: list[int], sampling: Sampling) -> Json:
    parameters = sampling.fields()
    # Stop strings stay in the text, as they do in the tokens.
    parameters |= {"max_new_tokens": parameters.pop("max_tokens", None), "no_stop_trim": True}
    if "seed" in parameters:
        parameters["sampling_seed"] = parameters.pop("seed")
    return {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}


def _sglang_sampled(body: Json, prompt: list[int]) -> Sampled:
    about = body["meta_info"]
    entries = about.get("output_token_logprobs")
    tokens = _token_ids(body.get("output_ids") or [each[1] for each in entries or ()], None, prompt)
    logprobs = None if entries is None else [each[0] for each in entries]
    return _sampled(body, tokens, logprobs, about["finish_reason"]["type"])


APIS: Mapping[str, Api] = {
    api.name: api
    for api in (
        Api("generate", "/generate", _generate_request, _generate_sampled),
        Api("vllm", "/inference/v1/generate", _vllm_request, _vllm_sampled),
        Api("completions", "/v1/completions", _completions_request, _completions_sampled),
        Api("sglang", "/generate", _sglang_request, _sglang_sampled),
    )
}


# --- what they share ----------------------------------------------------------------------------------------


def _token_ids(said: Any, said_prompt: Any, prompt: Sequence[int]) -> list[int]:
    if not isinstance(said, list):
        raise NoTokens(
            "the response has no token ids",
            hint="serve with an API of token ids, or allow tokens made from text (--allow-retokenise)",
        )
    for at, token in enumerate(said):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < _END_OF_INT32:
            raise ServerFailed(
                f"token {at} of the answer is {token!r}, no token id", hint="see the server's log"
            )
    if said_prompt is not None and list(said_prompt) != list(prompt):
        raise NoTokens(
            f"the server sampled after a prompt of {len(said_prompt)} tokens, not after the {len(prompt)} of "
            "the request",
            hint="it must take the prompt as token ids, without adding or cutting any",
        )
    return said


def _checked_logprobs(logprobs: Sequence[Any], tokens: int) -> list[float]:
    """Returns one number for each token; NaN where the server gave none, and no row is lost by it."""
    if len(logprobs) != tokens:
        raise NoTokens(
            f"the response has {len(logprobs)} log-probabilities for {tokens} tokens", hint=_WITH_LOGPROBS
        )
    for at, each in enumerate(logprobs):
        if isinstance(each, bool) or not (each is None or isinstance(each, (int, float))):
            raise NoTokens(f"the log-probability of token {at} is {each!r}", hint=_WITH_LOGPROBS)
    return [math.nan if each is None else each for each in logprobs]


def _sampled(body: Json, tokens: list[int], logprobs: list[float] | None, reason: Any) -> Sampled:
    if reason == "error":
        raise ServerFailed("the server ended the answer with an error", hint="see the server's log")
    if not tokens and reason != "abort":
        raise ServerFailed("the answer is empty, without even an end token", hint="see the server's log")
    if logprobs is not None:
        logprobs = _checked_logprobs(logprobs, len(tokens))
    versions = [-1] * len(tokens)
    for completion in completions_in(body)[:1]:
        for version, start, end in completion.spans:
            versions[start:end] = [version] * (end - start)
    known: FinishReason = reason if reason in get_args(FinishReason) else "stop"
    return Sampled(tokens, logprobs, versions, known)
