"""Sampling and the engine around it: what is drawn and reported; weights change between answers only.

The weights source is fed by hand; HTTP and the program are in `test_policy_server.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shmbridge
from shmbridge.consumers.engines.published_tensors import copy_into
from shmbridge.consumers.learner.train.publishing import first_version
from shmbridge.consumers.policy_server.engine import (
    EngineClosed,
    PolicyEngine,
    Question,
    Reply,
    WeightsFollower,
)
from shmbridge.consumers.policy_server.sampler import NotFinite, PolicyModel, Row, Sampling
from shmbridge.weights import WeightsReader, WeightsWriter

ROOT = Path(__file__).parents[3]
END = 1
PROMPTS = [[2, 25, 9, 13, 1, 3], [2, 27, 16, 17, 18, 1, 3], [25], [2, 27, 20, 1, 3]]


def tiny(seed: int) -> tuple[torch.nn.Module, Any]:
    spec = importlib.util.spec_from_file_location("tiny_model", ROOT / "examples" / "tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_model(seed).eval(), module.build_tokenizer()


@pytest.fixture
def policy() -> PolicyModel:
    return PolicyModel(*tiny(seed=1), version=0, seed=3)


class HandFed:
    """A weights source whose versions are put in by the test."""

    def __init__(self) -> None:
        self.held: SimpleNamespace | None = None
        self.leases = 0
        self.trouble: Exception | None = None

    @property
    def version(self) -> int | None:
        if self.trouble is not None:
            raise self.trouble
        return self.held.version if self.held else None

    @contextmanager
    def lease(self, *, timeout_s: float | None = None) -> Iterator[SimpleNamespace]:
        self.leases += 1
        yield self.held

    def close(self) -> None:
        self.held = None

    def publish(self, version: int, model: torch.nn.Module) -> None:
        tensors = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
        for array in tensors.values():
            array.setflags(write=False)
        dtypes = dict.fromkeys(tensors, "float32")
        self.held = SimpleNamespace(
            version=version,
            tensors=tensors,
            dtypes=dtypes,
            changed_since=lambda _: frozenset(tensors),
            require_finite=lambda: None,
        )


@pytest.fixture
def weights() -> HandFed:
    return HandFed()


@pytest.fixture
def engine(policy: PolicyModel, weights: HandFed) -> Iterator[PolicyEngine]:
    engine = PolicyEngine(policy, WeightsFollower(weights, policy.model))
    engine.start()
    yield engine
    engine.close()


def sample(policy: PolicyModel, prompts, **how) -> list[Row]:
    seed = how.get("seed")
    rows = [
        Row(prompt, Sampling(**how), None if seed is None else seed + line)
        for line, prompt in enumerate(prompts)
    ]
    policy.generate(rows)
    return rows


def recomputed(model, prompt: list[int], answer: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of an answer from one forward pass without any cache or padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(answer)[:, None])[:, 0].numpy()


# --- sampling -----------------------------------------------------------------------------------------------


def with_learned_positions(context: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=28, n_embd=32, n_layer=2, n_head=2, n_positions=context, initializer_range=0.5
    )
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_batched_greedy_answers_are_those_given_alone(policy, positions):
    if positions == "learned":  # where a left-padded prompt begins makes a difference
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=28, n_embd=32, n_layer=2, n_head=2, n_positions=16, initializer_range=0.5
        )
        policy = PolicyModel(GPT2LMHeadModel(config), policy.tokenizer)
    together = sample(policy, PROMPTS, max_tokens=9, temperature=0.0, ignore_eos=True)
    for prompt, row in zip(PROMPTS, together, strict=True):
        (alone,) = sample(policy, [prompt], max_tokens=9, temperature=0.0, ignore_eos=True)
        assert row.token_ids == alone.token_ids
        np.testing.assert_allclose(row.logprobs, alone.logprobs, atol=1e-4)
        np.testing.assert_allclose(row.logprobs, recomputed(policy.model, prompt, row.token_ids), atol=1e-4)


def test_a_finished_row_does_not_break_one_that_goes_on_to_the_end_of_the_context(policy):
    policy = PolicyModel(with_learned_positions(16), policy.tokenizer)
    short = Row(PROMPTS[1], Sampling(max_tokens=2, temperature=0.0, ignore_eos=True))
    long = Row(PROMPTS[2], Sampling(max_tokens=15, temperature=0.0, ignore_eos=True))
    policy.generate([short, long])
    assert (len(short.token_ids), len(long.token_ids)) == (2, 15)
    np.testing.assert_allclose(long.logprobs, recomputed(policy.model, PROMPTS[2], long.token_ids), atol=1e-4)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.6, 0.8), (0.0, 1.0)])
def test_logprobs_are_those_of_the_tempered_distribution(policy, temperature, top_p):
    for prompt, row in zip(
        PROMPTS, sample(policy, PROMPTS, max_tokens=8, temperature=temperature, top_p=top_p), strict=True
    ):
        expected = recomputed(policy.model, prompt, row.token_ids, temperature or 1.0)
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


def test_tokens_are_drawn_with_their_probabilities_and_top_p_cuts_the_tail(policy):
    prompt = PROMPTS[0]
    with torch.no_grad():
        p = policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    ordered = np.argsort(-p)
    nucleus = ordered[: int(np.searchsorted(np.cumsum(p[ordered]), 0.5)) + 1]

    drawn = [row.token_ids[0] for row in sample(policy, [prompt] * 4000, max_tokens=1)]
    assert np.abs(np.bincount(drawn, minlength=28) / 4000 - p).max() < 0.03
    narrow = [row.token_ids[0] for row in sample(policy, [prompt] * 500, max_tokens=1, top_p=0.5)]
    assert set(narrow) == set(nucleus.tolist())


def test_a_seed_gives_the_same_answer_in_any_company(policy):
    (alone,) = sample(policy, PROMPTS[:1], max_tokens=10, seed=11)
    with_others = sample(policy, PROMPTS, max_tokens=10, seed=11)
    assert alone.token_ids == with_others[0].token_ids
    assert len({tuple(row.token_ids) for row in sample(policy, PROMPTS[:1] * 4, max_tokens=10, seed=11)}) == 4


def test_answers_end_at_the_end_token_a_stop_token_a_stop_string_or_the_limit(policy):
    rows = sample(policy, PROMPTS[:1] * 64, max_tokens=6, seed=5)
    ended = [row for row in rows if END in row.token_ids]
    assert ended
    assert all(row.token_ids[-1] == END and row.finish_reason == "stop" for row in ended)
    assert all(row.finish_reason == "length" and len(row.token_ids) == 6 for row in rows if row not in ended)

    (plain,) = sample(policy, PROMPTS[:1], max_tokens=20, temperature=0.0, ignore_eos=True)
    third = plain.token_ids[2]
    (by_token,) = sample(
        policy,
        PROMPTS[:1],
        max_tokens=20,
        temperature=0.0,
        ignore_eos=True,
        stop_token_ids=frozenset({third}),
    )
    assert by_token.token_ids == plain.token_ids[: plain.token_ids.index(third) + 1]
    word = plain.text[1:3]
    (by_word,) = sample(policy, PROMPTS[:1], max_tokens=20, temperature=0.0, ignore_eos=True, stop=(word,))
    assert by_word.finish_reason == "stop"
    assert by_word.text == plain.text[: plain.text.index(word)]
    assert by_word.token_ids == plain.token_ids[: len(by_word.token_ids)]
    assert len(by_word.token_ids) < len(plain.token_ids)


# --- weights ------------------------------------------------------------------------------------------------


async def ask(engine: PolicyEngine, prompts=PROMPTS, **how) -> Reply:
    return await engine.ask(Question(prompts, Sampling(**({"max_tokens": 8} | how))))


async def test_new_weights_change_the_answer_and_its_version(engine, weights):
    before = await ask(engine, temperature=0.0)
    other, tokenizer = tiny(seed=2)
    weights.publish(41, other)
    after = await ask(engine, temperature=0.0)
    expected = sample(PolicyModel(other, tokenizer), PROMPTS, max_tokens=8, temperature=0.0)

    assert (before.version, after.version, engine.version) == (0, 41, 41)
    assert [row.token_ids for row in after.rows] == [row.token_ids for row in expected]
    assert [row.token_ids for row in after.rows] != [row.token_ids for row in before.rows]
    await ask(engine)
    assert weights.leases == 1  # an unchanged version is not copied again


async def test_a_learner_that_dies_or_starts_over_does_not_stop_the_server(engine, weights):
    weights.publish(7, tiny(seed=2)[0])
    assert (await ask(engine)).version == 7
    weights.held = None  # the segment is gone
    assert (await ask(engine)).version == 7
    weights.publish(3, tiny(seed=3)[0])  # resumed from an older checkpoint
    assert (await ask(engine)).version == 3
    weights.trouble = shmbridge.LayoutMismatch("another layout")  # and an error of the bridge is not ours
    assert (await ask(engine)).version == 3
    weights.trouble = None
    weights.publish(4, tiny(seed=3)[0])
    assert (await ask(engine)).version == 4


async def test_weights_of_another_model_are_refused_whole_and_said_once(engine, weights, policy, caplog):
    original = {name: value.clone() for name, value in policy.model.state_dict().items()}
    other, _ = tiny(seed=2)
    weights.publish(5, other)
    weights.held.tensors["lm_head.weight"] = np.zeros((27, 64), dtype=np.float32)
    for _ in range(3):
        assert (await ask(engine)).version == 0
    assert all(torch.equal(value, original[name]) for name, value in policy.model.state_dict().items())
    complaints = [record.getMessage() for record in caplog.records if "another model" in record.getMessage()]
    assert len(complaints) == 1
    assert "lm_head.weight (27, 64) here (28, 64)" in complaints[0]
    assert engine.stats().refused_version == 5
    assert "another model" in engine.stats().last_error
    weights.publish(6, other)
    assert (await ask(engine)).version == 6
    assert (engine.stats().refused_version, engine.stats().last_error) == (None, None)


async def test_weights_that_are_not_finite_are_refused_and_the_next_are_taken(policy, bridge, caplog):
    """As those of another model: the answers go on with the version before."""
    engine = PolicyEngine(policy, WeightsFollower(WeightsReader(bridge), policy.model))
    engine.start()
    original = {name: value.clone() for name, value in policy.model.state_dict().items()}
    named = [(name, value.detach().clone()) for name, value in tiny(seed=2)[0].named_parameters()]
    try:
        with WeightsWriter(bridge) as writer:
            for version, bad in ((1, float("inf")), (2, float("nan")), (3, 0.5)):
                named[4][1].view(-1)[-1] = bad
                writer.publish(version, named)
                reply = await ask(engine)
                stats = engine.stats()
                if version < 3:
                    assert reply.version == 0
                    assert all(map(math.isfinite, reply.rows[0].logprobs))
                    assert stats.refused_version == version
                    assert f"not finite: 1 of {len(named)} tensors, first {named[4][0]!r}" in stats.last_error
            assert (reply.version, stats.refused_version, stats.last_error) == (3, None, None)
    finally:
        engine.close()
    assert not torch.equal(policy.model.state_dict()[named[4][0]], original[named[4][0]])


@pytest.mark.parametrize("scored", [None, 1])
async def test_an_output_that_is_not_finite_is_an_error_of_that_request_alone(policy, scored):
    """A model that was loaded so, or whose dtype is too small: no answer has a token without a number."""
    policy.version = 12
    engine = PolicyEngine(policy, window_s=0.2)
    embedding = policy.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[20] = float("nan")  # only a prompt with this token is hit
    engine.start()
    try:
        asked = [
            Question([[2, 25, end]], Sampling(max_tokens=3, temperature=0.0), 1, scored) for end in (20, 9)
        ]
        bad, good = await asyncio.gather(*map(engine.ask, asked), return_exceptions=True)
    finally:
        engine.close()
    assert isinstance(bad, NotFinite)
    assert "policy version 12 is not finite" in str(bad)
    assert all(map(math.isfinite, good.rows[0].logprobs))


@pytest.mark.parametrize("top_p", [1e-50, 1e-40, 1e-8])
def test_a_nucleus_that_vanishes_in_float32_has_the_likeliest_token(policy, top_p):
    (narrow,) = sample(policy, [PROMPTS[0]], max_tokens=6, top_p=top_p, seed=1, ignore_eos=True)
    (greedy,) = sample(policy, [PROMPTS[0]], max_tokens=6, temperature=0.0, ignore_eos=True)
    assert narrow.token_ids == greedy.token_ids


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e30, 1e300])
def test_the_coldest_and_the_hottest_answers_have_numbers(policy, temperature):
    (row,) = sample(policy, [PROMPTS[0]], max_tokens=6, temperature=temperature, top_logprobs=20)
    assert all(map(math.isfinite, row.logprobs))
    assert all(math.isfinite(value) for entry in row.alternatives for value in entry.values())


def test_bfloat16_weights_arrive_and_gaps_are_named():
    source, target = tiny(seed=2)[0], tiny(seed=3)[0]
    halves = {name: value.detach().bfloat16() for name, value in source.named_parameters()}
    bits = {name: value.view(torch.uint16).numpy() for name, value in halves.items()}
    copy_into(target, bits, dict.fromkeys(bits, "bfloat16"))
    assert all(torch.equal(value, halves[name].float()) for name, value in target.named_parameters())

    bits["nobody.knows"] = bits.pop("model.norm.weight")
    with pytest.raises(
        shmbridge.WeightsMismatch, match=r"missing: model\.norm\.weight; unknown: nobody\.knows"
    ):
        copy_into(target, bits, dict.fromkeys(bits, "bfloat16"))


@pytest.mark.parametrize(("word", "kind"), [("float4_e2m1fn_x2", np.uint8), ("float128", np.longdouble)])
def test_types_that_torch_does_not_convert_are_refused_before_anything_is_copied(word, kind):
    target = torch.nn.Linear(2, 2)
    before = target.bias.detach().clone()
    arrays = {"bias": np.ones(2, np.float32), "weight": np.ones((2, 2), kind)}
    with pytest.raises(shmbridge.WeightsMismatch, match=f"type that torch does not convert: weight {word}"):
        copy_into(target, arrays, {"bias": "float32", "weight": word})
    assert torch.equal(target.bias, before)


def test_float8_weights_are_numbers_and_not_their_bits():
    target = torch.nn.Linear(2, 2, bias=False)
    numbers = torch.tensor([[0.5, 1.0], [-2.0, 448.0]])
    copy_into(
        target,
        {"weight": numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()},
        {"weight": "float8_e4m3fn"},
    )
    assert torch.equal(target.weight, numbers)


def test_tensors_that_did_not_change_are_not_copied_again(bridge):
    target = torch.nn.Linear(2, 2)
    with WeightsWriter(bridge) as writer:
        follower = WeightsFollower(WeightsReader(bridge), target)
        writer.publish(1, [("weight", torch.ones(2, 2)), ("bias", torch.ones(2))])
        assert follower.refresh() == 1
        with torch.no_grad():
            target.weight.fill_(-1)  # only this test does so, to see which tensors are copied
        writer.publish(2, [("bias", torch.full((2,), 2.0))], changed_only=True)
        assert follower.refresh() == 2
        assert (target.weight.unique().item(), target.bias.unique().item()) == (-1, 2)
        writer.publish(3, [("bias", torch.full((2,), 3.0))], changed_only=True)
        writer.publish(4, [("weight", torch.full((2, 2), 4.0))], changed_only=True)
        assert follower.refresh() == 4
        assert (target.weight.unique().item(), target.bias.unique().item()) == (4, 3)
        follower.close()


def test_the_version_after_a_dead_learner_of_another_model_is_loaded(bridge):
    """It had replaced the segment and published nothing: the next learner's first version has another number,
    and is not passed over.
    """
    target = torch.nn.Linear(2, 2)

    def model(value: float) -> list:
        return [("weight", torch.full((2, 2), value)), ("bias", torch.full((2,), value))]

    with WeightsWriter(bridge) as writer:
        follower = WeightsFollower(WeightsReader(bridge), target)
        writer.publish(7, model(7))
        assert follower.refresh() == 7
    with (
        WeightsWriter(bridge) as other,
        pytest.raises(ZeroDivisionError),
        other.fill(8, [("another", "float32", (4,))]),
    ):
        raise ZeroDivisionError
    assert follower.refresh() is None
    with WeightsWriter(bridge) as writer:
        writer.publish(first_version(None, -1, writer.last_version), model(9))
        assert follower.refresh() == 8
        assert target.weight.unique().item() == 9
        assert follower.refresh() is None
    follower.close()


async def test_every_answer_comes_from_one_version_though_versions_come_mid_answer(
    engine, weights, policy, monkeypatch
):
    models = {0: tiny(seed=1)[0]} | {version: tiny(seed=version)[0] for version in range(2, 8)}
    forward, calls, coming = policy.model.forward, itertools.count(1), iter(range(2, 8))

    def publishing(*args, **kwargs):
        if next(calls) % 5 == 3 and (version := next(coming, None)) is not None:
            weights.publish(version, models[version])
        return forward(*args, **kwargs)

    monkeypatch.setattr(policy.model, "forward", publishing)

    async def asking() -> list[Reply]:
        return [await ask(engine, ignore_eos=True) for _ in range(6)]

    async with asyncio.timeout(60):
        replies = [reply for several in await asyncio.gather(asking(), asking()) for reply in several]

    assert len({reply.version for reply in replies}) >= 4
    for reply in replies:  # mixed weights would show in the log-probabilities
        for prompt, row in zip(PROMPTS, reply.rows, strict=True):
            expected = recomputed(models[reply.version], prompt, row.token_ids)
            np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


# --- batching -----------------------------------------------------------------------------------------------


async def test_requests_that_come_together_share_a_batch(engine):
    await asyncio.gather(*(ask(engine) for _ in range(16)))
    stats = engine.stats()
    assert stats.rows_total == 16 * len(PROMPTS)
    assert stats.batches_total <= 4


async def test_a_request_that_breaks_the_model_fails_alone(engine, policy, monkeypatch):
    forward = policy.model.forward

    def fragile(*args, **kwargs):
        if (kwargs["input_ids"] == 20).any():
            raise RuntimeError("token 20 is poison")
        return forward(*args, **kwargs)

    monkeypatch.setattr(policy.model, "forward", fragile)
    outcomes = await asyncio.gather(
        ask(engine, [[2, 20, 3]], max_tokens=1),
        *(ask(engine, [[2, digit, 3]], max_tokens=1) for digit in (6, 7, 8)),
        return_exceptions=True,
    )
    assert "poison" in str(outcomes[0])
    assert [len(reply.rows[0].token_ids) for reply in outcomes[1:]] == [1, 1, 1]


async def test_closing_ends_a_long_answer_at_its_next_token(engine, policy, monkeypatch):
    forward, calls = policy.model.forward, []

    def until_closed(*args, **kwargs):
        calls.append(1)
        while len(calls) == 3 and engine.alive:
            time.sleep(0.001)
        return forward(*args, **kwargs)

    monkeypatch.setattr(policy.model, "forward", until_closed)
    asked = asyncio.create_task(ask(engine, max_tokens=100, ignore_eos=True))
    async with asyncio.timeout(30):
        while len(calls) < 3:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosed):
            await asked
    assert len(calls) <= 5
    with pytest.raises(EngineClosed):
        await ask(engine)
