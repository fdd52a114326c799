"""What the policy server does not do is refused by name; what it cannot hold, before any work."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from shmbridge.consumers.policy_server.api import PolicyApi
from shmbridge.consumers.policy_server.engine import PolicyEngine
from shmbridge.consumers.policy_server.sampler import PolicyModel
from shmbridge.consumers.policy_server.server import PolicyServer
from shmbridge.httpd.door import BadRequest
from tests.adapters.served import Client, served

DOORS = {
    "completions": {"prompt": [5, 6]},
    "chat": {"messages": [{"role": "user", "content": ">3"}]},
    "generate": {"prompt": {"prompt_token_ids": [5, 6]}},
}


class Letters:
    """A tokenizer with a token for each letter, and one of many letters; counts the texts it was given."""

    def __init__(self, longest: int = 50) -> None:
        self.vocabulary = {chr(97 + number): number for number in range(27)} | {"x" * longest: 27}
        self.seen: list[int] = []

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def encode(self, text: str, **_: object) -> list[int]:
        self.seen.append(len(text))
        return [ord(letter) % 27 for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return "".join(each["content"][-40:] for each in messages)  # as templates that cut earlier thoughts


def api(context: int = 64, **more: object) -> PolicyApi:
    return PolicyApi(Letters(**more), "m", context, 28)


def asked(door: str, **fields: object) -> bytes:
    return json.dumps(DOORS[door] | fields).encode()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", "root ::= x"),
        ("structured_outputs", {"choice": ["a"]}),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [3]),
        ("logit_bias", {"5": 10}),
        ("min_tokens", 2),
        ("dry_multiplier", 0.8),
        ("max_new_tokens", 4),
        ("repetition_detection", {}),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("tool_choice", "required"),
        ("temprature", 0.1),
        ("", 1),
        ("prompt\n", "x"),
    ],
)
def test_a_field_that_would_change_the_answer_is_named(door, name, value):
    with pytest.raises(BadRequest) as refused:
        getattr(api(), door)(asked(door, **{name: value}))
    assert repr(name) in str(refused.value) or str(refused.value).startswith(f"{name}: ")
    assert str(refused.value).count(" -> ") == 1


@pytest.mark.parametrize("door", DOORS)
def test_what_changes_nothing_is_taken(door):
    """What clients send without thinking of it, and null for anything that is known."""
    harmless = {
        "model": "any",
        "user": "me",
        "priority": 3,
        "stream_options": {"include_usage": True},
        "stream": False,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "top_k": -1,
        "bad_words": [],
        "guided": None,
        "tools": None,
        "tool_choice": "none",
        "n": None,
        "service_tier": "auto",
    }
    del harmless["guided"]
    question = getattr(api(), door)(asked(door, **harmless))
    assert question.row_count == 1


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-7, 9.9e-7])
def test_a_temperature_that_vanishes_is_refused(door, temperature):
    with pytest.raises(BadRequest, match="0 for greedy"):
        getattr(api(), door)(asked(door, temperature=temperature))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("stop", [["a"] * 17, ["b" * 1025], "c" * 1025, [""] * 20_000])
def test_stop_strings_are_few(door, stop):
    with pytest.raises(BadRequest, match="at most 16 of at most 1024"):
        getattr(api(), door)(asked(door, stop=stop))
    assert getattr(api(), door)(asked(door, stop=["a"] * 16)).sampling.stop == ("a",) * 16


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"prompt":' + b"[" * 30_000,
        b'{"messages":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"temperature": 1e400}',
        b'{"seed": ' + b"7" * 5000 + b"}",
        b'{"prompt": [' + b"7" * 5000 + b"]}",
        b'{"max_tokens": -1e400}',
        b'{"n": 1e999}',
        b"\xff\xfe",
        b'"\\ud800"',
        b'{"prompt": "\\ud800"}',
        b"NaN",
        b'{"temperature": NaN}',
        b'{"top_p": Infinity}',
        b"{}{}",
        b"null",
        b"true",
        b"[[]]",
        b"",
        b"\x00",
        b'{"prompt": [true, false]}',
        b'{"prompt": [[1, true]]}',
        b'{"prompt": [1, null]}',
        b'{"prompt": {"prompt_token_ids": [true]}}',
        b'{"prompt": {"prompt_token_ids": [1.5]}}',
        b'{"prompt": {"prompt_token_ids": [1], "multi_modal_data": {}}}',
        b'{"prompt": {"prompt_token_ids": [99999999999999999999999]}}',
        b'{"messages": [1]}',
        b'{"messages": [{"role": 5}]}',
        b'{"messages": {}}',
        b'{"prompt": "", "stop": [1]}',
        b'{"prompt": "a", "n": 257}',
        b'{"prompt": "a", "n": 99999999999999999999}',
    ],
)
def test_a_hostile_body_is_a_bad_request(door, raw):
    with pytest.raises(BadRequest) as refused:
        getattr(api(), door)(raw)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("longest", [3, 50])
def test_a_text_that_no_context_holds_is_not_tokenised(door, longest):
    """By the length of the longest token; a tokenizer may have one for every unknown word, of any length."""
    translates = api(longest=longest)
    most = 64 * max(longest, 32)
    text = "a" * (most + 1)
    body = {
        "completions": {"prompt": ["ab", text]},
        "chat": {"messages": [{"role": "user", "content": "a" * 40}] * (most // 40 + 1)},
        "generate": {"prompt": text},
    }[door]
    with pytest.raises(BadRequest, match=rf"has \d+ characters, a context of 64 .* at most {most} -> "):
        getattr(translates, door)(json.dumps(body).encode())
    assert max(translates.tokenizer.seen, default=0) <= 2
    body = {"completions": {"prompt": text[1:]}, "chat": {"messages": []}, "generate": {"prompt": text[1:]}}[
        door
    ]
    with pytest.raises(BadRequest, match=r"characters are 5\d\d tokens|messages is empty"):
        getattr(translates, door)(json.dumps(body).encode())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 70_000},
        {"prompt": ["[", *[[]] * 70_000]},
        {"prompt": ['\\"'] * 70_000},
        {"metadata": {"a\\": [[1, []]] * 40_000}},
        {f"{key:x}": 0 for key in range(70_000)},
    ],
    ids=["objects", "lists", "texts", "metadata", "keys"],
)
def test_very_many_values_are_not_made_objects(door, fields):
    """What stands in a text counts once."""
    with pytest.raises(BadRequest, match=r"has \d+ texts, lists and objects, at most 66048 are taken"):
        getattr(api(), door)(asked(door, **fields))
    text = '[{"\\' * 100_000
    given = {"messages": [{"role": "user", "content": text}]} if door == "chat" else {"prompt": text}
    if door != "chat":  # whose template here cuts it
        with pytest.raises(BadRequest, match="has 400000 characters"):
            getattr(api(), door)(json.dumps(given).encode())
    else:
        assert api().chat(json.dumps(given | {"max_tokens": 4}).encode()).row_count == 1


@pytest.mark.parametrize("door", DOORS)
def test_a_large_field_beside_the_prompt_is_refused(door):
    with pytest.raises(BadRequest, match="stop_token_ids has 1200000 bytes, at most 1048576"):
        getattr(api(), door)(asked(door, stop_token_ids=[77] * 300_000))


@pytest.mark.parametrize("context", [1, 64, 1000])
def test_tokens_that_no_context_holds_are_not_made_numbers(context, monkeypatch):
    """Flat or in lists, also with texts that look like them; what fits is taken."""
    translates = api(context + 16)
    many = [5] * (context + 20)
    for door, prompt in (
        ("completions", many),
        ("completions", [many, many]),
        ("completions", [[5], many, many, many]),
        ("generate", {"prompt_token_ids": many}),
    ):
        with pytest.raises(BadRequest, match=r"do not fit into a context of"):
            getattr(translates, door)(json.dumps({"prompt": prompt}).encode())
    fits = [5] * context
    for door, prompt in (
        ("completions", fits),
        ("completions", [fits, fits, [5]]),
        ("generate", {"prompt_token_ids": fits}),
        ("completions", ["[,,,,,,,,,,,,,,,", "{,,,"] * (context > 1)),
        ("generate", "[,,,,,,,,,,,,,,,,"[: context + 1]),
    ):
        if prompt:
            getattr(translates, door)(
                json.dumps({"prompt": prompt, "max_tokens": 16 if prompt is fits else 1}).encode()
            )


def test_no_more_of_a_text_is_tokenised_than_shows_that_it_is_too_long():
    """A text of few tokens for its length is taken; one of many is not tokenised to its end."""
    translates = api(context=256, longest=400)
    with pytest.raises(
        BadRequest, match="the first 2048 of 90000 characters are 2048 tokens, a context has 256"
    ):
        translates.generate(json.dumps({"prompt": "a" * 90_000}).encode())
    assert translates.tokenizer.seen == [2048]

    class Sparse(Letters):
        def encode(self, text: str, **_: object) -> list[int]:
            self.seen.append(len(text))
            return [1] * (len(text) // 400)

    sparse = PolicyApi(Sparse(400), "m", 256, 28)
    question = sparse.generate(json.dumps({"prompt": "a" * 80_000, "max_tokens": 56}).encode())
    assert len(question.prompts[0]) == 200
    assert sparse.tokenizer.seen[-1] == 80_000


def test_messages_that_the_template_cuts_may_be_long():
    """What is measured is what would be tokenised: a template drops earlier thoughts."""
    body = {"messages": [{"role": "user", "content": "a" * 100_000}], "max_tokens": 4}
    assert len(api().chat(json.dumps(body).encode()).prompts[0]) == 40


def test_more_rows_than_a_batch_are_refused_before_they_are_tokenised():
    translates = api()
    with pytest.raises(BadRequest, match="257 answers at once, at most 256"):
        translates.completions(json.dumps({"prompt": ["a"] * 257}).encode())
    assert not translates.tokenizer.seen


@pytest.fixture
async def slow() -> AsyncIterator[tuple[Client, SimpleNamespace]]:
    """A server with a context of 2^20 tokens whose tokenizer takes a second, without the GIL."""
    config = Qwen2Config(
        vocab_size=28,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1 << 20,
    )
    torch.manual_seed(0)
    told = SimpleNamespace(tokenising=0)

    class Slow(Letters):
        eos_token_id = 1

        def encode(self, text: str, **_: object) -> list[int]:
            told.tokenising += 1
            time.sleep(1.0)
            return [3] * (2 << 20)

        def decode(self, tokens: list[int], **_: object) -> str:
            return "a" * len(tokens)

    policy = PolicyModel(Qwen2ForCausalLM(config), Slow())
    engine = PolicyEngine(policy)
    engine.start()
    try:
        async with served(PolicyServer(engine, PolicyApi(Slow(), "m", policy.context, 28))) as client:
            yield client, told
    finally:
        engine.close()


async def test_health_is_answered_while_texts_are_tokenised(slow):
    client, told = slow
    asking = [
        asyncio.create_task(client.post("/v1/completions", json={"prompt": "a" * 99})) for _ in range(3)
    ]
    waits = []
    while not all(task.done() for task in asking):
        began = time.perf_counter()
        assert (await client.get("/health")).status == 200
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    assert [(await task).status for task in asking] == [400] * 3
    assert told.tokenising == 3
    assert sorted(waits)[len(waits) * 9 // 10] < 0.2  # a busy machine may hold one of them up
