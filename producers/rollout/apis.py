"""The APIs by which servers sample from token ids: the request body of each, and how its response is read.

Used by `http_server.py`. Sources: vLLM 0.32 (`entrypoints/scale_out/token_in_token_out/protocol.py`,
`entrypoints/openai/completion/protocol.py`), SGLang's native `/generate`, the policy server's `/generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from shmbridge.producers.rollout.responses import completions_in
from shmbridge.producers.rollout.sampling import FinishReason, NoTokens, Sampled, Sampling, ServerFailed

Json = dict[str, Any]

_END_OF_INT32 = 1 << 31
_WITH_LOGPROBS = "start the server with log-probabilities, or allow rows without (--allow-retokenise)"


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
