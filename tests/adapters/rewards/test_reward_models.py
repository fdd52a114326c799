"""Values of reward models are those of a forward pass of the model itself, position by position."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import shmbridge
from shmbridge.producers.rewards import (
    BatchedScorer,
    HuggingFacePrm,
    OwnText,
    OwnTokens,
    RewardedProducer,
    RewardsFailed,
    SplitByTag,
    StepRewards,
    StepRow,
    TokenClass,
    math_shepherd,
    next_token_prm,
    qwen_math_prm,
    split_by_blank_line,
    trl_prm,
)
from shmbridge.producers.rollout import TokenText

ROWS = [("what?", "a+b.\n\nthat is c.\n\nd"), ("who?", "x"), ("2+2?", "4\n\n5")]


async def scored(judge: Any, group: dict[str, Any], policy: Any, splitter: Any = None) -> dict[str, Any]:
    with BatchedScorer(judge) as scorer:
        return await StepRewards(scorer, splitter or split_by_blank_line(policy), tokenizer=policy)(group)


def outputs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].float()


async def test_a_separator_behind_each_step_as_qwens_models_read_it(
    classifier_folder: Path, make_group: Callable[..., dict[str, Any]], policy: Any
) -> None:
    group = make_group(*ROWS)
    new = await scored(qwen_math_prm(str(classifier_folder), tokenizer=policy), group, policy)
    model = AutoModelForTokenClassification.from_pretrained(classifier_folder).eval()
    separator = policy.convert_tokens_to_ids("<extra_0>")
    for (prompt, answer), tokens, rewards, ends in zip(
        ROWS, group["tokens"], new["step_rewards"], new["step_ends"], strict=True
    ):
        steps = [step for step in answer.replace("\n\n", "\n\n|").split("|") if step]
        ids = policy.encode(prompt)
        assert len(steps) == len(rewards) == len(ends)
        for step, reward in zip(steps, rewards, strict=True):
            ids += [*policy.encode(step), separator]
            assert reward == pytest.approx(outputs(model, ids).softmax(-1)[-1, 1].item(), abs=1e-5)
        assert [token for token in ids if token != separator] == tokens
        assert ends == list(np.cumsum([len(policy.encode(step)) for step in steps]) + len(prompt))


async def test_a_model_with_a_tokenizer_of_its_own_gets_text_in_its_template(
    classifier_folder: Path, make_group: Callable[..., dict[str, Any]], policy: Any
) -> None:
    group = make_group(("9", "a.\n\nb"), messages=[[{"role": "user", "content": "why?"}]])
    new = await scored(
        qwen_math_prm(str(classifier_folder), tokenizer=policy, own_text=True, system="s"), group, policy
    )
    model = AutoModelForTokenClassification.from_pretrained(classifier_folder).eval()
    text = "system:s<|end|>user:why?<|end|>assistant:"
    for step, reward in zip(["a.<extra_0>", "b<extra_0>"], new["step_rewards"][0], strict=True):
        text += step
        assert reward == pytest.approx(
            outputs(model, policy.encode(text)).softmax(-1)[-1, 1].item(), abs=1e-5
        )


async def test_the_last_token_of_a_separator_as_trl_trains_it(
    classifier_folder: Path, make_group: Callable[..., dict[str, Any]], policy: Any
) -> None:
    group = make_group(("why?", "a.\n\nb"))
    new = await scored(
        trl_prm(str(classifier_folder), tokenizer=policy, separator="\n", good=0), group, policy
    )
    model = AutoModelForTokenClassification.from_pretrained(classifier_folder).eval()
    expected = [
        outputs(model, policy.encode(text)).softmax(-1)[-1, 0].item()
        for text in ("why? a.\n", "why? a.\nb\n")
    ]
    assert new["step_rewards"] == [pytest.approx(expected, abs=1e-5)]


async def test_the_next_token_after_a_tag_as_math_shepherd_says_it(
    causal_folder: Path, make_group: Callable[..., dict[str, Any]], make_tokenizer: Any, policy: Any
) -> None:
    """The policy has other tokens than the model: values come from the model's, ends from the policy's."""
    group = make_group(("why?", "a is b.\n\nso c"), ("who?", "d"))
    new = await scored(math_shepherd(str(causal_folder)), group, policy)
    model = AutoModelForCausalLM.from_pretrained(causal_folder).eval()
    theirs = make_tokenizer("bytes")
    good, bad = (theirs.encode(text)[-1] for text in "+-")
    expected = [["why? a is b. ки", "why? a is b. ки\nso c ки"], ["who? d ки"]]
    for row, texts in zip(new["step_rewards"], expected, strict=True):
        for value, text in zip(row, texts, strict=True):
            of_next = outputs(model, theirs.encode(text))[-1, [good, bad]].softmax(-1)[0].item()
            assert value == pytest.approx(of_next, abs=1e-5)
    assert new["step_ends"] == [[4 + len("a is b.\n\n"), 4 + len("a is b.\n\nso c")], [5]]


async def test_a_tag_that_the_policy_writes_itself_is_read_where_it_stands(
    causal_folder: Path, make_tokenizer: Any
) -> None:
    """Where it wrote none, one is put in before the end of the turn."""
    theirs = make_tokenizer("bytes")
    tag = theirs.encode(" ки", add_special_tokens=False)
    row = theirs.encode("why? a ки b", add_special_tokens=False)
    prompt = len(theirs.encode("why?", add_special_tokens=False))
    group = {"tokens": [[*row, theirs.eos_token_id]], "prompt_length": [prompt]}
    judge = next_token_prm(str(causal_folder), tag=" ки", good="+", bad="-", own_text=False)
    new = await scored(judge, group, theirs, SplitByTag(theirs, "ки"))
    model = AutoModelForCausalLM.from_pretrained(causal_folder).eval()
    pair = [theirs.encode(text)[-1] for text in "+-"]
    first = outputs(model, row[: new["step_ends"][0][0]])[-1, pair].softmax(-1)[0].item()
    second = outputs(model, [*row, *tag])[-1, pair].softmax(-1)[0].item()
    assert new["step_rewards"] == [pytest.approx([first, second], abs=1e-5)]


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
async def test_a_head_of_one_class(
    activation: Any, policy: Any, make_group: Callable[..., dict[str, Any]]
) -> None:
    from transformers import Qwen2Config, Qwen2ForTokenClassification

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_labels": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForTokenClassification(Qwen2Config(vocab_size=len(policy), **sizes, **heads)).eval()
    judge = HuggingFacePrm(model, OwnTokens(), TokenClass(0, activation))
    group = make_group(("q", "a\n\nb"))
    new = await scored(judge, group, policy)
    head = outputs(model, group["tokens"][0])[:, 0]
    head = head.sigmoid() if activation == "sigmoid" else head
    assert new["step_rewards"] == [
        pytest.approx([head[end - 1].item() for end in new["step_ends"][0]], abs=1e-5)
    ]


async def test_what_the_learner_gets_is_what_the_model_says(
    bridge: str, classifier_folder: Path, make_group: Callable[..., dict[str, Any]], policy: Any
) -> None:
    """Groups of concurrent tasks, together in a forward pass, through a real lane."""
    groups = [make_group(*ROWS, score=[1.0, 0.0, float(at)]) for at in range(6)]
    judge = qwen_math_prm(str(classifier_folder), tokenizer=policy)
    model = AutoModelForTokenClassification.from_pretrained(classifier_folder).eval()
    separator = policy.convert_tokens_to_ids("<extra_0>")
    with BatchedScorer(judge, max_rows=8) as scorer, shmbridge.Consumer(bridge) as consumer:
        stage = StepRewards(scorer, split_by_blank_line(policy))
        with RewardedProducer(shmbridge.Producer(bridge, lane_bytes="1M"), stage) as producer:
            sequences = await asyncio.gather(*(producer.put_async(group) for group in groups))
            assert sorted(sequences) == list(range(6))
            assert 3 <= scorer.stats()["calls_total"] < 6
        for _ in groups:
            with consumer.get(timeout_s=10) as record:
                for row, tokens in enumerate(groups[0]["tokens"]):
                    assert record["tokens"][row].tolist() == tokens
                    rewards, ends = record["step_rewards"][row], record["step_ends"][row].tolist()
                    assert len(rewards) == len(ends) > 0
                    ids, before = [], 0
                    for reward, end in zip(rewards.tolist(), ends, strict=True):
                        ids += [*tokens[before:end], separator]
                        before = end
                        direct = outputs(model, ids).softmax(-1)[-1, 1].item()
                        assert reward == pytest.approx(direct, abs=1e-5)


async def test_a_row_that_is_too_long_is_refused_and_not_cut(
    classifier_folder: Path, make_group: Callable[..., dict[str, Any]], policy: Any
) -> None:
    judge = qwen_math_prm(str(classifier_folder), tokenizer=policy)
    with pytest.raises(RewardsFailed, match=r"302 tokens for the reward model, which takes 256"):
        await scored(judge, make_group(("q", "a" * 300)), policy)


async def test_ids_that_the_model_does_not_know_are_named(classifier_folder: Path, policy: Any) -> None:
    """On a GPU they would end the process's use of it."""
    group = {"tokens": [[5, 6, 99999]], "loss_mask": [[0, 1, 1]]}
    with pytest.raises(RewardsFailed, match=r"token 99999, and the reward model knows \d+"):
        await scored(qwen_math_prm(str(classifier_folder), tokenizer=policy), group, policy)


async def test_rows_without_steps_have_none(classifier_folder: Path, policy: Any) -> None:
    group = {"tokens": [[5, 6], [5, 6]], "loss_mask": [[0, 0], [0, 1]]}
    new = await scored(qwen_math_prm(str(classifier_folder), tokenizer=policy), group, policy)
    assert new["step_ends"] == [[], [2]]
    assert [len(row) for row in new["step_rewards"]] == [0, 1]


def test_models_that_cannot_be_asked_are_refused(
    classifier_folder: Path, causal_folder: Path, policy: Any
) -> None:
    with pytest.raises(RewardsFailed, match="is 2 tokens of the model"):
        qwen_math_prm(str(classifier_folder), tokenizer=policy, separator="ab")
    with pytest.raises(RewardsFailed, match="end in the same token"):
        next_token_prm(str(causal_folder), tag="к", good="a+", bad="b+")


def test_text_is_read_at_the_last_token_of_each_marker(make_tokenizer: Any, policy: Any) -> None:
    theirs = make_tokenizer("bytes")
    tokens = policy.encode("why? a ки b")
    row = StepRow.of(tokens, [(4, len(tokens))], [6, len(tokens)], None, TokenText(policy))
    made = OwnText(theirs, " ки", between="\n")(row)
    said = [theirs.decode(made.ids[: read + 1]) for read in made.reads]
    assert said == ["why? a ки", "why? a ки\nки b ки"]


def test_a_marker_that_the_models_tokenizer_drops_is_refused(make_tokenizer: Any, policy: Any) -> None:
    """Else a value would be read at the token before it."""
    from tokenizers import normalizers

    theirs = copy.deepcopy(make_tokenizer("bytes"))
    theirs.backend_tokenizer.normalizer = normalizers.Replace("ки", "")
    tokens = policy.encode("why?a")
    row = StepRow.of(tokens, [(4, 5)], [5], None, TokenText(policy))
    with pytest.raises(RewardsFailed, match="no token of its own for a marker 'ки'"):
        OwnText(theirs, "ки")(row)
