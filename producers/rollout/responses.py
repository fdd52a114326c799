"""Parses the policy versions in an inference server's response into `Completion`s. It supports four formats:
`/generate` as vLLM has it for Atropos, with `weight_versions`; `/inference/v1/generate` of vLLM itself; the
OpenAI API, with `weight_version` and `oldest_weight_version`, which `/generate` also has before vLLM 0.32;
SGLang's. Never raises, for any response.

Used by `apis.py`, and by `shmbridge.producers.atropos.response_hooks` for environments' own requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shmbridge.put import token_array

Tokens: TypeAlias = npt.NDArray[np.int32]
Span: TypeAlias = tuple[int, int, int]  # version, and the output tokens [start, end) that it sampled

_END_OF_INT32 = 1 << 31


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
