"""The JSON of a policy server: request bodies to questions, replies to response bodies.

Speaks the OpenAI completions and chat completions API, and vLLM's token-in token-out: `/generate` in the form
that Atropos sends and parses, `/inference/v1/generate` in vLLM's own. Every answer says which policy versions
sampled it: those two token by token, in `weight_versions`, the OpenAI API with the newest and the oldest, and
with the tokens of prompt and answer.
Used by `policy_server.py`.

What a request may ask is in `fields.py`.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shmbridge.config import wrong_value
from shmbridge.consumers.policy_server.engine import Question, Reply
from shmbridge.consumers.policy_server.sampler import Row, Sampling, TokenLogprobs
from shmbridge.errors import counted, kind_of, shown
from shmbridge.httpd.door import BadRequest

Json = dict[str, Any]

_VLLM_DEFAULT_TOKENS = 16  # of completions and /generate; a chat may fill its context
_LEAST_CHARACTERS = 32  # of a token, at least: a tokenizer may have one token for any unknown word
_BEGINNING = 8  # characters for a token of the context: so much is tokenised first
_AT_THE_CUT = 64  # tokens
_ESCAPED = 6  # bytes of JSON for a character, at most: \uXXXX
_LEAST_BODY, _LARGE_BODY, _MOST_BODY = 1 << 20, 16 << 20, 64 << 20  # bytes


@dataclass(frozen=True)
class PolicyApi:
    """Translates for one model. For one thread at a time, as its tokenizer is.

    Args:
        tokenizer: the model's.
        model_name: what responses call the model.
        context: most tokens of prompt and answer together.
        vocab_size: token ids are below this.
        max_rows: most answers to one request.
    """

    tokenizer: Any
    model_name: str
    context: int
    vocab_size: int
    max_rows: int = 256

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, at least; no token of text has more."""
        vocabulary = self.tokenizer.get_vocab() if self.tokenizer is not None else {}
        return max(_LEAST_CHARACTERS, max(map(len, vocabulary), default=0))

    @cached_property
    def most_body(self) -> int:
        """Bytes that a request's body has at most: a prompt that fills the context, or many short ones."""
        prompt = self.context * self.longest_token * _ESCAPED
        return _LEAST_BODY + min(_MOST_BODY, self.max_rows * prompt, max(_LARGE_BODY, prompt))

    # --- requests ------------------------------------------------------------------------------------------

    def completions(self, raw: bytes) -> Question:
        """Returns the question of a `/v1/completions` body; raises BadRequest. Blocks, tokenising."""
        body = decoded(raw, Completions, self.context)
        given = prompt_list(body.prompt)
        self._require_rows(len(given), body)
        prompts = [each if isinstance(each, list) else self._encoded(each) for each in given]
        return self._question(body, prompts, body.max_tokens or _VLLM_DEFAULT_TOKENS, body.logprobs or 0)

    def chat(self, raw: bytes) -> Question:
        """Returns the question of a `/v1/chat/completions` body; raises BadRequest. Blocks, tokenising."""
        body = decoded(raw, Chat, self.context)
        self._require_rows(1, body)
        prompt = self._rendered(body)
        room = max(1, self.context - len(prompt))
        wanted = body.max_completion_tokens or body.max_tokens or room
        return self._question(body, [prompt], wanted, (body.top_logprobs or 0) if body.logprobs else 0)

    def generate(self, raw: bytes) -> Question:
        """Returns the question of a `/generate` body; raises BadRequest. Blocks, tokenising."""
        body = decoded(raw, Generate, self.context)
        self._require_rows(1, body)
        given = body.prompt
        prompt = given.prompt_token_ids if isinstance(given, PromptTokens) else self._encoded(given)
        wanted = body.max_tokens or _VLLM_DEFAULT_TOKENS
        return self._question(body, [prompt], wanted, body.logprobs or 0, body.prompt_logprobs)

    def tokens(self, raw: bytes) -> Question:
        """Returns the question of a `/inference/v1/generate` body; raises BadRequest. Never blocks."""
        body = decoded(of_tokens(raw), Generate, self.context)
        self._require_rows(1, body)
        assert isinstance(body.prompt, PromptTokens)
        prompt = body.prompt.prompt_token_ids
        wanted = body.max_tokens or max(1, self.context - len(prompt))
        return self._question(body, [prompt], wanted, body.logprobs or 0, body.prompt_logprobs)

    def _question(
        self,
        body: SamplingFields,
        prompts: list[list[int]],
        wanted: int,
        top_logprobs: int,
        prompt_logprobs: int | None = None,
    ) -> Question:
        for prompt in prompts:
            self._check(prompt, wanted)
        return Question(prompts, body.sampling(wanted, top_logprobs), body.n or 1, prompt_logprobs)

    def _require_rows(self, prompts: int, body: SamplingFields) -> None:
        if (rows := prompts * (body.n or 1)) > self.max_rows:
            raise BadRequest(f"{rows} answers at once, at most {self.max_rows} -> lower n")

    def _check(self, prompt: list[int], wanted: int) -> None:
        if not prompt:
            raise BadRequest("the prompt has no tokens -> prompt: text of which the tokenizer makes tokens")
        if strange := [token for token in prompt if not 0 <= token < self.vocab_size]:
            raise BadRequest(
                f"token id {strange[0]} is outside the vocabulary of {self.vocab_size} -> "
                "use this model's tokenizer"
            )
        if (room := self.context - len(prompt)) < wanted:
            hint = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
            raise BadRequest(
                f"{len(prompt)} prompt and {wanted} new tokens do not fit into a context of "
                f"{self.context} -> {hint}"
            )

    def _encoded(self, text: str, **how: Any) -> list[int]:
        """Returns the tokens of a text. Raises BadRequest for one that no context holds, by its length or the
        tokens of its beginning: time and memory are those of a few contexts.
        """
        if len(text) > (most := self.context * self.longest_token):
            raise BadRequest(
                f"the prompt has {len(text)} characters, a context of {self.context} tokens holds at most "
                f"{most} -> shorten it"
            )
        part = _BEGINNING * self.context
        while part < len(text):  # a few tokens at the cut may be others than in the whole
            if (
                tokens := len(self.tokenizer.encode(text[:part], **how))
            ) > self.context * 9 // 8 + _AT_THE_CUT:
                raise BadRequest(
                    f"the first {part} of {len(text)} characters are {tokens} tokens, a context has "
                    f"{self.context} -> shorten it"
                )
            part *= 2
        return list(self.tokenizer.encode(text, **how))

    def _rendered(self, body: Chat) -> list[int]:
        if not body.messages:
            raise BadRequest('messages is empty -> messages: [{"role": "user", "content": "..."}]')
        try:
            text = self.tokenizer.apply_chat_template(
                body.messages, tokenize=False, add_generation_prompt=body.add_generation_prompt
            )
        except Exception as error:  # a template is a program: it raises whatever it likes
            raise BadRequest(
                f"the chat template refused the messages: {error} -> each has role and content"
            ) from error
        # As text first: what apply_chat_template(tokenize=True) returns differs between transformers 4 and 5.
        return self._encoded(text, add_special_tokens=False)

    # --- responses -----------------------------------------------------------------------------------------

    def completions_response(self, question: Question, reply: Reply) -> Json:
        """Returns the body for `/v1/completions`."""
        choices = [
            {
                "index": index,
                "text": row.text,
                "finish_reason": row.finish_reason,
                "token_ids": row.token_ids,
                "prompt_token_ids": row.prompt,
                "logprobs": self._completion_logprobs(row),
            }
            for index, row in enumerate(reply.rows)
        ]
        return self._response("text_completion", choices, question, reply)

    def chat_response(self, question: Question, reply: Reply) -> Json:
        """Returns the body for `/v1/chat/completions`."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": row.text},
                "finish_reason": row.finish_reason,
                "token_ids": row.token_ids,
                "logprobs": {"content": list(self._chat_logprobs(row))},
            }
            for index, row in enumerate(reply.rows)
        ]
        return self._response("chat.completion", choices, question, reply) | {
            "prompt_token_ids": question.prompts[0]
        }

    def generate_response(self, question: Question, reply: Reply) -> Json:
        """Returns the body for `/generate`: per answer and token `[{token id: log-probability, ...}]`."""
        body: Json = {
            "text": [row.text for row in reply.rows],
            "finish_reasons": [row.finish_reason for row in reply.rows],
            "logprobs": [[[entry] for entry in _per_token(row)] for row in reply.rows],
            "token_ids": [row.token_ids for row in reply.rows],
            "prompt_token_ids": list(question.prompts[0]),
            "weight_version": reply.version,
            "weight_versions": [self._spans(row, reply) for row in reply.rows],
        }
        if reply.prompt_logprobs:
            body["prompt_logprobs"] = reply.prompt_logprobs[0]
        return body

    def tokens_response(self, question: Question, reply: Reply) -> Json:
        """Returns the body for `/inference/v1/generate`, as vLLM 0.32 has it: ids, no text."""
        choices = [
            {
                "index": index,
                "finish_reason": row.finish_reason,
                "token_ids": row.token_ids,
                "logprobs": {"content": list(_of_ids(row))},
                "weight_versions": self._spans(row, reply),
            }
            for index, row in enumerate(reply.rows)
        ]
        body = self._response("generate", choices, question, reply)
        body |= {"request_id": body.pop("id"), "output_mode": "tokens"}
        body["prompt_token_ids"] = list(question.prompts[0])
        if reply.prompt_logprobs:
            body["prompt_logprobs"] = reply.prompt_logprobs[0]
        return body

    @staticmethod
    def _spans(row: Row, reply: Reply) -> list[Json]:
        """One span: weights change between two batches only."""
        return [{"version": str(reply.version), "start": 0, "end": len(row.token_ids)}]

    def models(self, version: int) -> Json:
        """Returns the body for `/v1/models`."""
        card = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "shmbridge"}
        return {"object": "list", "data": [card | {"max_model_len": self.context, "weight_version": version}]}

    def _response(self, kind: str, choices: list[Json], question: Question, reply: Reply) -> Json:
        prompt_tokens = sum(map(len, question.prompts))
        new_tokens = sum(len(row.token_ids) for row in reply.rows)
        return {
            "id": uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": new_tokens,
                "total_tokens": prompt_tokens + new_tokens,
            },
            "weight_version": reply.version,
            "oldest_weight_version": reply.version,
        }

    def _completion_logprobs(self, row: Row) -> Json:
        words = [self.tokenizer.decode([token]) for token in row.token_ids]
        return {
            "tokens": words,
            "token_logprobs": row.logprobs,
            "top_logprobs": [
                {self.tokenizer.decode([token]): value for token, value in entry.items()}
                for entry in _per_token(row)
            ],
            "text_offset": [0, *itertools.accumulate(map(len, words))][: len(words)],
        }

    def _chat_logprobs(self, row: Row) -> Iterator[Json]:
        for token, value, entry in zip(row.token_ids, row.logprobs, _per_token(row), strict=True):
            likeliest = sorted(entry.items(), key=lambda item: -item[1])[: row.sampling.top_logprobs]
            yield self._named(token, value) | {"top_logprobs": [self._named(*pair) for pair in likeliest]}

    def _named(self, token: int, value: float) -> Json:
        word = self.tokenizer.decode([token])
        return {"token": word, "logprob": value, "bytes": list(word.encode())}


def _per_token(row: Row) -> list[TokenLogprobs]:
    if row.alternatives:
        return row.alternatives
    return [{token: value} for token, value in zip(row.token_ids, row.logprobs, strict=True)]


def _of_ids(row: Row) -> Iterator[Json]:
    """The log-probability of each token, and of its likeliest alternatives if some were asked for."""
    for token, value, entry in zip(row.token_ids, row.logprobs, _per_token(row), strict=True):
        likeliest = sorted(entry.items(), key=lambda item: -item[1])[: row.sampling.top_logprobs]
        top = [{"token_id": int(each), "logprob": logprob} for each, logprob in likeliest]
        # `token` is vLLM's name of an id without text, which verifiers' renderers hold to the id.
        yield {"token": f"token_id:{token}", "token_id": token, "logprob": value, "top_logprobs": top}


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
