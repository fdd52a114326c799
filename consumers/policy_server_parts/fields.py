"""The fields of a policy server's requests: what is taken, what has no effect here, and what is refused.

An unsupported field that would change the answer is refused, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shmbridge.config import wrong_value
from shmbridge.consumers.policy_server_parts.generation import Sampling
from shmbridge.errors import counted, kind_of, shown
from shmbridge.httpd.door import BadRequest

Json = dict[str, Any]

# Fields that change nothing about an answer here, whatever their value.
_HARMLESS = {
    "cache_salt",
    "metadata",
    "model",
    "priority",
    "prompt_cache_key",
    "request_id",
    "return_token_ids",
    "routed_experts_prompt_start",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
# Unsupported fields, with the values that have no effect; null never has one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
}
_LEAST_TEMPERATURE = 1e-6  # above 0: below it, logits that are divided by it may leave float32
_MOST_STOPS, _LONGEST_STOP = 16, 1024  # strings, characters: each token is compared with them
_VALUES, _VALUES_OF_A_TOKEN = 1 << 16, 8  # texts, lists and objects of a body: a message has 5 or more
_LARGEST_FIELD = 1 << 20  # bytes, but for prompt and messages
_FORM = 'such as {"prompt": "...", "max_tokens": 16}'
_FORM_OF_TOKENS = 'such as {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16}}'

Count = Annotated[int, Meta(ge=1)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]


class SamplingFields(msgspec.Struct):
    """The common fields of the three request bodies; null means the default."""

    n: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Count | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    def sampling(self, max_tokens: int, top_logprobs: int) -> Sampling:
        """Returns how the answers are drawn. Raises BadRequest for what cannot be, or takes too long."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
            longest = max(map(len, stops))
            raise BadRequest(
                f"stop: {len(stops)} strings of up to {longest} characters -> "
                f"at most {_MOST_STOPS} of at most {_LONGEST_STOP}"
            )
        if self.temperature and self.temperature < _LEAST_TEMPERATURE:
            raise BadRequest(
                f"temperature: {self.temperature:g} is above 0, below {_LEAST_TEMPERATURE:g} -> 0 for greedy"
            )
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=tuple(filter(None, stops)),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            top_logprobs=top_logprobs,
        )


class Completions(SamplingFields):
    """The body of `/v1/completions`."""

    prompt: str | list[Any] = ""
    logprobs: Alternatives | None = None


class Chat(SamplingFields):
    """The body of `/v1/chat/completions`."""

    messages: list[Json] = []
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    add_generation_prompt: bool = True


class PromptTokens(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt in token ids."""

    prompt_token_ids: list[int]


class Generate(SamplingFields):
    """The body of `/generate`."""

    prompt: str | PromptTokens = ""
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None


# Of the route without text, what has no effect: `detokenize` and the like concern text alone.
_NEUTRAL_OF_TOKENS: dict[str, tuple[Any, ...]] = {
    "content_parts": ([],),
    "detokenize": (True, False),
    "features": (),
    "output_mode": ("tokens",),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
}

Body = TypeVar("Body", bound=SamplingFields)


def of_tokens(raw: bytes | bytearray) -> bytes:
    """Returns the body of `/inference/v1/generate` as one of `/generate`. Raises BadRequest.

    Its token ids become the prompt, its sampling parameters fields of the whole; what both may name, such as
    `model`, is the body's. Nothing but the names is decoded.
    """
    try:
        parts = _PARTS.decode(raw)
        fields = _PARTS.decode(parts.pop("sampling_params", b"{}"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        said = str(error).partition(" - at ")[0]
        raise BadRequest(f"{said or 'the body is not JSON'} -> {_FORM_OF_TOKENS}") from None
    if "token_ids" not in parts:
        raise BadRequest(f"the body has no token_ids -> {_FORM_OF_TOKENS}")
    if other := {"prompt", "messages"} & {*parts, *fields}:
        raise BadRequest(f"{min(other)!r} is not a field of such a request -> {_FORM_OF_TOKENS}")
    parts["prompt"] = msgspec.Raw(b'{"prompt_token_ids":%b}' % bytes(parts.pop("token_ids")))
    fields |= parts
    for name, allowed in _NEUTRAL_OF_TOKENS.items():
        if name in fields:
            value = msgspec.json.decode(fields.pop(name))
            if value is not None and value not in allowed:
                raise BadRequest(f"{name}: {shown(value)} is not supported -> leave {name} out")
    return msgspec.json.encode(fields)


def decoded(raw: bytes | bytearray, kind: type[Body], context: int) -> Body:
    """Returns the fields of a body. Raises BadRequest, which names the first that is wrong."""
    if not raw:
        raise BadRequest(f"the body is empty -> {_FORM}")
    _require_few_values(raw, context)
    try:
        _require_known(raw, kind, context)
        fields = msgspec.json.decode(raw)
    except RecursionError:
        raise BadRequest(f"the body has brackets within brackets without end -> {_FORM}") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadRequest(f"the body is not JSON: {str(error).partition(' - at ')[0]} -> {_FORM}") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"the body is {kind_of(fields)}, no JSON object -> {_FORM}")
    for name in fields.keys() & _NEUTRAL.keys():
        if (value := fields[name]) is not None and value not in _NEUTRAL[name]:
            raise BadRequest(f"{name}: {shown(value)} is not supported -> leave {name} out")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"{wrong_value(str(error), fields)} -> correct that value, or leave it out"
        ) from None


_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _require_few_values(raw: bytes | bytearray, context: int) -> None:
    """Raises BadRequest for more texts, lists and objects than requests have: making millions of them stops
    all threads for seconds, and takes many times the memory of the body.
    """
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # whose quotes all begin or end a text
    most = _VALUES + _VALUES_OF_A_TOKEN * context
    values = plain.count(b'"') // 2
    if values <= most:
        values += sum(part.count(b"[") + part.count(b"{") for part in plain.split(b'"')[::2])
    if values > most:
        raise BadRequest(
            f"the body has {values} texts, lists and objects, at most {most} are taken with a context of "
            f"{context} -> send less at once"
        )


def _require_known(raw: bytes | bytearray, kind: type[SamplingFields], context: int) -> None:
    """Raises BadRequest for unknown and for large fields, and for lists of more token ids than fit into the
    context, before they become objects.
    """
    try:
        parts = _PARTS.decode(raw)
    except msgspec.ValidationError:
        return  # not an object, which is said elsewhere
    for name, part in parts.items():
        if name not in _HARMLESS and name not in _NEUTRAL and name not in kind.__struct_fields__:
            raise BadRequest(f"{shown(name)} is not a field of such a request -> leave it out")
        size = memoryview(part).nbytes
        if size > _LARGEST_FIELD and name not in ("prompt", "messages"):
            raise BadRequest(f"{name} has {size} bytes, at most {_LARGEST_FIELD} are taken -> shorten it")
    prompt = bytes(parts.get("prompt", b""))
    keys = {b"[": 0, b"{": 2}.get(prompt[:1], -1)  # quotes: `{"prompt_token_ids": [...]}` has one key
    if prompt.count(b'"') != keys:
        return  # text, or a list of texts
    lists, tokens = prompt.count(b"["), prompt.count(b",") + 1
    if tokens > lists * (context + 1):
        where = counted(lists, "list")
        raise BadRequest(
            f"{tokens} token ids in {where} do not fit into a context of {context} -> send fewer"
        )


def prompt_list(prompt: str | list[Any]) -> list[str | list[int]]:
    """OpenAI's four forms of a prompt: text, tokens, and a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if all(type(token) is int for token in prompt):  # type(), since true and false are int, too
        return [prompt]
    for one in prompt:
        if not isinstance(one, str) and not (
            isinstance(one, list) and all(type(each) is int for each in one)
        ):
            raise BadRequest(f"prompt: {shown(one)} is neither text nor token ids -> prompt: [[1, 2, 3]]")
    return prompt
