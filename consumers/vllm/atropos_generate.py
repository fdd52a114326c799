"""`POST /generate` for Atropos' vLLM server class, token ids in and out, served by an engine in this process.

The form is that of the vLLM server in Atropos' example trainer, plus the policy version of each token.
Unknown fields are refused, never ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shmbridge.httpd.door import BadRequest

Json = dict[str, Any]
_UNKNOWN = {"version": "unknown"}
_LOWEST = -9999.0  # JSON has no minus infinity; vLLM's own responses use this value


class PromptTokens(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt in token ids."""

    prompt_token_ids: list[int]


Count = Annotated[int, Meta(ge=1)]


class Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body: a prompt, and fields of vLLM's SamplingParams, for which null means the default."""

    prompt: str | PromptTokens
    model: str | None = None
    stream: bool | None = None

    n: Count | None = None
    max_tokens: Count | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def sampling(self) -> Json:
        """Returns the given fields that belong to SamplingParams."""
        given = msgspec.structs.asdict(self)
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in ("prompt", "model", "stream")
        }


def question(raw: bytes | bytearray, models: Collection[str]) -> Question:
    """Parses a request body; `models` are the names under which the engine's model is served.

    Raises BadRequest: invalid JSON, an unknown field, another model, or a stream.
    """
    try:
        asked = msgspec.json.decode(raw, type=Question)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(str(error)) from error
    if asked.stream:
        raise BadRequest(
            "stream = true is not supported: an answer is sent whole, with the versions of its tokens"
        )
    if asked.model is not None and asked.model not in models:
        raise BadRequest(f"model {asked.model!r} is not served here; served are {', '.join(sorted(models))}")
    return asked


def reports_versions() -> bool:
    """Whether this vLLM reports which version sampled which token, as 0.32 does. Never blocks."""
    from vllm.outputs import CompletionOutput

    return hasattr(CompletionOutput, "weight_versions")


async def generate(client: Any, asked: Question) -> Json:
    """Runs a request on vLLM's AsyncLLM and returns the response; raises BadRequest if the engine refuses it.

    Awaits the last token; cancelling it aborts the request in the engine.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    final: Any = None
    try:
        params = SamplingParams(**asked.sampling(), output_kind=RequestOutputKind.FINAL_ONLY)
        async with aclosing(
            client.generate(msgspec.to_builtins(asked.prompt), params, uuid.uuid4().hex)
        ) as outputs:
            async for output in outputs:
                final = output
    except (VLLMClientError, ValueError, TypeError) as error:
        raise BadRequest(str(error)) from error
    except Exception as error:  # the engine wraps errors of its prompt checks
        if isinstance(error.__cause__, (ValueError, TypeError)):
            raise BadRequest(str(error.__cause__)) from error
        raise
    assert final is not None  # a request ends with an output, or raises
    return answer(final, client.tokenizer)


def answer(final: Any, tokenizer: Any) -> Json:
    """Returns the body for a finished RequestOutput.

    `logprobs` is, per completion and token, `[{token id: log-probability}]`, with the sampled token first.
    `weight_versions` is, per completion, the spans `[start, end)` of its tokens and the version that sampled
    them; null if the engine does not report it, as before vLLM 0.32.
    """
    outputs = final.outputs
    prompt_tokens = list(final.prompt_token_ids or ())
    prompt = final.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(prompt_tokens)
    spans = [_spans(getattr(output, "weight_versions", None)) for output in outputs]  # from 0.32
    body: Json = {
        "text": [output.text for output in outputs],
        "prompt": prompt,
        "finish_reasons": [output.finish_reason for output in outputs],
        "prompt_token_ids": prompt_tokens,
        "token_ids": [list(output.token_ids) for output in outputs],
        "weight_versions": spans,
        "weight_version": newest(spans),
    }
    if all(output.logprobs is not None for output in outputs):
        body["logprobs"] = [[[_plain(entry)] for entry in output.logprobs] for output in outputs]
    if final.prompt_logprobs is not None:
        body["prompt_logprobs"] = [
            None if entry is None else _plain(entry) for entry in final.prompt_logprobs
        ]
    return body


def _plain(entry: Mapping[int, Any]) -> dict[int, float]:
    return {token: max(chance.logprob, _LOWEST) for token, chance in entry.items()}


def _spans(versions: Sequence[Any] | None) -> list[Json] | None:
    if versions is None:
        return None
    return [{"version": span.version, "start": span.start, "end": span.end} for span in versions]


def newest(answers: Iterable[list[Json] | None]) -> int | None:
    """Returns the newest version of all spans; None if any of them is unknown, or there is none."""
    labels = [span["version"] for spans in answers for span in ([_UNKNOWN] if spans is None else spans)]
    return max(map(int, labels), default=None) if all(label.isdecimal() for label in labels) else None
