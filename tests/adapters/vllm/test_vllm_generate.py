"""Atropos' `/generate` for vLLM, tested without vLLM: refused bodies, and an answer's fields for tokens."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from shmbridge.consumers.vllm.middleware import BadRequest, answer, question

MODELS = ["policy"]


def body(**fields) -> bytes:
    return msgspec.json.encode({"prompt": {"prompt_token_ids": [5, 6]}} | fields)


def test_fields_go_to_the_sampler_and_nulls_mean_nothing():
    given = {"n": 2, "max_tokens": 3, "temperature": 0.5, "logprobs": 0}
    asked = question(body(model="policy", stop=None, stream=False, logit_bias={"3": 1}, **given), MODELS)
    assert asked.prompt.prompt_token_ids == [5, 6]
    assert asked.sampling() == given | {"logit_bias": {3: 1.0}}
    assert question(body(prompt="say it"), MODELS).prompt == "say it"


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "truncated"),
        (b"\xff{}", "malformed"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `prompt`"),
        (body(prompt={"prompt_token_ids": [1], "multi_modal_data": {}}), "unknown field `multi_modal_data`"),
        (
            body(prompt={"prompt_token_ids": [1.5]}),
            r"Expected `int`, got `float` - at `\$.prompt.prompt_token_ids",
        ),
        (body(temperature="hot"), "temperature"),
        (body(n=0), "n"),
        (body(use_beam_search=True), "unknown field `use_beam_search`"),
        (body(output_kind=0), "unknown field `output_kind`"),
        (body(stream=True), "stream = true is not supported"),
        (body(model="another"), "'another' is not served here; served are policy"),
    ],
)
def test_a_body_that_cannot_be_answered_is_refused_with_the_reason(raw, told):
    with pytest.raises(BadRequest, match=told):
        question(raw, MODELS)


def chance(logprob: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob)


def output(tokens, spans, logprobs=None, finish="stop") -> SimpleNamespace:
    versions = None if spans is None else [SimpleNamespace(version=v, start=s, end=e) for v, s, e in spans]
    return SimpleNamespace(
        text="ab", token_ids=tokens, logprobs=logprobs, finish_reason=finish, weight_versions=versions
    )


def final(*outputs, prompt="hello", prompt_logprobs=None) -> SimpleNamespace:
    return SimpleNamespace(
        prompt=prompt, prompt_token_ids=[5, 6], prompt_logprobs=prompt_logprobs, outputs=list(outputs)
    )


def test_answer_says_which_version_sampled_which_token():
    told = answer(
        final(output([1, 2, 3], [("16", 0, 1), ("17", 1, 3)]), output([4], [("17", 0, 1)], finish="length")),
        None,
    )
    assert told["weight_versions"] == [
        [{"version": "16", "start": 0, "end": 1}, {"version": "17", "start": 1, "end": 3}],
        [{"version": "17", "start": 0, "end": 1}],
    ]
    assert told["weight_version"] == 17
    assert told["finish_reasons"] == ["stop", "length"]
    assert told["token_ids"] == [[1, 2, 3], [4]]
    assert "logprobs" not in told


@pytest.mark.parametrize(
    ("spans", "newest"),
    [
        (([("9", 0, 1)], [("10", 0, 1)]), 10),  # as numbers, not as words
        (([("default", 0, 1)], [("10", 0, 1)]), None),
        ((None, [("10", 0, 1)]), None),
        (([], [("10", 0, 1)]), 10),  # ended before its first token
        (([], []), None),
    ],
)
def test_newest_version_is_null_where_one_is_unknown(spans, newest):
    told = answer(final(*(output([1], each) for each in spans)), None)
    assert told["weight_version"] == newest
    assert msgspec.json.decode(msgspec.json.encode(told))["weight_version"] == newest


def test_logprobs_come_as_atropos_reads_them():
    logprobs = [{7: chance(-0.5), 3: chance(-0.1)}, {2: chance(float("-inf"))}]
    told = msgspec.json.decode(
        msgspec.json.encode(answer(final(output([7, 2], [("1", 0, 2)], logprobs)), None))
    )
    # as its server class does
    read = [(int(next(iter(entry[0]))), next(iter(entry[0].values()))) for entry in told["logprobs"][0]]
    assert read == [(7, -0.5), (2, -9999.0)], "the sampled token first, and nothing that JSON cannot say"


def test_prompt_is_decoded_where_it_came_as_tokens():
    tokenizer = SimpleNamespace(decode=lambda tokens: f"text of {tokens}")
    assert answer(final(output([1], []), prompt=None), tokenizer)["prompt"] == "text of [5, 6]"
    told = answer(final(output([1], []), prompt=None, prompt_logprobs=[None, {6: chance(-0.25)}]), None)
    assert (told["prompt"], told["prompt_logprobs"]) == (None, [None, {6: -0.25}])
