"""Scores become what the config says, part by part, and the environment's own is kept."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmbridge
from shmbridge.producers.rewards import (
    FormatMarker,
    Linear,
    RewardBridge,
    RewardConfig,
    RewardedProducer,
    RewardsFailed,
)

# What ROLL's environment has, with the base it has for wrong answers said here and not implied.
ROLL = {"base": {-1: 0}, "format_markers": {"<think>": 0.2, "\\boxed{": 0.3}, "length_bounty_max": 0.2}
ANSWERS = [("q", "<think>a"), ("q", "no"), ("q", "<think>b\\boxed{4}"), ("q", "\\boxed{" + "a" * 400)]
SCORES = [-1.0, -1.0, 1.0, 0.0]


def test_without_a_config_a_score_stays_what_it_is(make_group: Callable[..., Any]) -> None:
    """ROLL's bridge made -1.0 and something of every score that is not above 0, whatever was configured."""
    group = make_group(*ANSWERS, scores=SCORES)
    for config in (None, {}, RewardConfig()):
        assert RewardBridge(config).now(group) == group  # no tokenizer, no messages: none are needed


def test_a_score_is_its_base_and_its_named_parts(make_group: Callable[..., Any], policy: Any) -> None:
    group = make_group(*ANSWERS, scores=SCORES)
    before = copy.deepcopy(group)
    new = RewardBridge(ROLL, tokenizer=policy).now(group)
    assert new["reward_components"] == [
        {"base": 0.0, "<think>": 0.2, "\\boxed{": 0.0, "length_bounty": pytest.approx(0.008)},
        {"base": 0.0, "<think>": 0.0, "\\boxed{": 0.0, "length_bounty": pytest.approx(0.002)},
        {"base": 1.0, "<think>": 0.2, "\\boxed{": 0.3, "length_bounty": 0.0},
        {"base": 0.0, "<think>": 0.0, "\\boxed{": 0.3, "length_bounty": 0.2},
    ]
    assert new["scores"] == pytest.approx([0.208, 0.002, 1.5, 0.5])
    assert new["raw_score"] == SCORES
    assert group == before


def test_what_the_user_sets_is_what_counts(make_group: Callable[..., Any], policy: Any) -> None:
    """ROLL read its config from an attribute that nothing ever set."""
    group = make_group(("q", "<think>"), score=[-1.0])

    def score(config: Any) -> float:
        (made,) = RewardBridge(config, tokenizer=policy).now(group)["score"]
        return made

    assert score({"format_markers": {"<think>": 0.2}}) == pytest.approx(-0.8)
    assert score({"format_markers": {"<think>": 0.7}}) == pytest.approx(-0.3)
    assert score({"format_markers": {"<tool>": 0.7}}) == -1.0
    assert score({"base": {-1: 0}}) == 0.0
    assert score({"base": {1: 5}}) == -1.0
    assert score({"base": {"scale": 2, "offset": 0.5}}) == -1.5
    assert score({"clamp": [-0.25, 1]}) == -0.25
    assert score({"length_bounty": {"cap": 1, "rate": 0.01}}) == pytest.approx(-0.93)
    assert score({"length_bounty": {"cap": 1, "rate": 0.01}, "wrong_at_most": -2}) == -1.0


def test_markers_once_each_and_only_when_wrong(make_group: Callable[..., Any], policy: Any) -> None:
    markers = (
        FormatMarker(r"<.>", 1.0, regex=True, name="once"),
        FormatMarker(r"<.>", 1.0, regex=True, count="each", name="each"),
        FormatMarker("<a>", 1.0, when="wrong", name="wrong"),
        FormatMarker("z", -2.0, count="each", name="penalty"),
    )
    group = make_group(("q", "<a><b>"), ("q", "<a>zz"), ("q<a>z", "b"), score=[0.0, 1.0, 0.0])
    new = RewardBridge(RewardConfig(format_markers=markers), tokenizer=policy).now(group)
    assert new["reward_components"] == [
        {"base": 0.0, "once": 1.0, "each": 2.0, "wrong": 1.0, "penalty": 0.0},
        {"base": 1.0, "once": 1.0, "each": 1.0, "wrong": 0.0, "penalty": -4.0},
        {"base": 0.0, "once": 0.0, "each": 0.0, "wrong": 0.0, "penalty": 0.0},  # the prompt does not count
    ]
    assert new["score"] == [4.0, -1.0, 0.0]


def test_the_parts_add_up_to_the_score(make_group: Callable[..., Any], policy: Any) -> None:
    rng = random.Random(3)
    for _ in range(100):
        config = RewardConfig(
            base=rng.choice([{0: rng.gauss(0, 1)}, Linear(rng.gauss(0, 1), rng.gauss(0, 1))]),
            format_markers=(FormatMarker("a", rng.gauss(0, 1), count="each"),),
            clamp=rng.choice([None, (-0.5, 0.5), (None, 0.0), (0.1, None)]),
        )
        group = make_group(("q", "a" * rng.randrange(1, 5)), score=[float(rng.randrange(2))])
        new = RewardBridge(config, tokenizer=policy).now(group)
        (parts,) = new["reward_components"]
        assert new["score"] == [pytest.approx(sum(parts.values()))]
        lowest, highest = config.clamp or (None, None)
        assert lowest is None or new["score"][0] >= lowest
        assert highest is None or new["score"][0] <= highest


def test_text_is_what_the_assistant_says_where_nothing_decodes(make_group: Callable[..., Any]) -> None:
    messages = [
        [
            {"role": "user", "content": "say <think>"},
            {"role": "assistant", "content": "a <b>"},
            {"role": "assistant", "content": [{"type": "text", "text": "<c>"}, {"type": "image"}]},
        ],
        [{"role": "assistant", "content": None}],
    ]
    group = make_group(("q", "x"), ("q", "y"), score=[0.0, 0.0], messages=messages)
    markers = {"<think>": 1, "<b>": 2, "<c>": 4}
    new = RewardBridge({"format_markers": markers}).now(group)
    assert new["score"] == [6.0, 0.0]
    without_masks = {name: group[name] for name in ("tokens", "score", "messages")}
    assert RewardBridge({"format_markers": markers}).now(without_masks)["score"] == [6.0, 0.0]


@pytest.mark.parametrize("messages", [None, [], [[]], [None, None], ["text", "text"]])
def test_without_text_a_group_is_refused(messages: Any, make_group: Callable[..., Any]) -> None:
    group = make_group(("q", "x"), ("q", "y"), score=[0.0, 0.0], messages=messages)
    with pytest.raises(RewardsFailed, match="not at hand") as refused:
        RewardBridge({"format_markers": {"a": 1}}).now(group)
    assert "tokenizer" in str(refused.value)


def test_groups_that_lack_what_is_needed_are_refused(make_group: Callable[..., Any], policy: Any) -> None:
    bridge = RewardBridge(ROLL, tokenizer=policy)
    group = make_group(("q", "x"), score=[0.0])
    for name, why in (("tokens", "no tokens"), ("score", "no score"), ("loss_mask", "response is unknown")):
        with pytest.raises(RewardsFailed, match=why):
            bridge.now({**group, name: None})
    with pytest.raises(RewardsFailed, match="'score' has 2 rows, tokens have 1"):
        bridge.now({**group, "score": [0.0, 1.0]})
    with pytest.raises(RewardsFailed, match="'score' is not one number per row"):
        bridge.now({**group, "score": [[0.0]]})
    with pytest.raises(RewardsFailed, match="component 'base' already"):
        bridge.now({**group, "reward_components": [{"base": 1.0}]})
    # what only needs scores, needs nothing else
    assert RewardBridge({"base": {0: 1}}).now({"tokens": [[1]], "score": [0.0]})["score"] == [1.0]


def test_what_is_there_already_stays(make_group: Callable[..., Any]) -> None:
    group = make_group(("q", "x"), score=[2.0], raw_score=[7.0], reward_components=[{"speed": 2.0}])
    new = RewardBridge({"base": {2: 3}}).now(group)
    assert (new["score"], new["raw_score"]) == ([3.0], [7.0])
    assert new["reward_components"] == [{"speed": 2.0, "base": 3.0}]


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_scores_may_have_every_form(form: Any, make_group: Callable[..., Any]) -> None:
    new = RewardBridge({"base": {-1: 0}}).now(make_group(("q", "x"), ("q", "y"), score=form([-1.0, 0.5])))
    assert (new["score"], new["raw_score"]) == ([0.0, 0.5], [-1.0, 0.5])


async def test_the_consumer_gets_score_raw_score_and_parts(
    bridge: str, make_group: Callable[..., Any], policy: Any
) -> None:
    group = make_group(*ANSWERS, score=SCORES)
    stage = RewardBridge(ROLL, tokenizer=policy)
    expected = stage.now(group)
    with shmbridge.Consumer(bridge) as consumer:
        with RewardedProducer(shmbridge.Producer(bridge, lane_bytes="256K"), stage) as producer:
            producer.put(group)
            await producer.put_async(group)
            assert producer.put_many([group]) == [2]
        for _ in range(3):
            with consumer.get(timeout_s=10) as record:
                assert record["score"].tolist() == expected["score"]
                assert record["raw_score"].tolist() == SCORES
                assert record["reward_components"] == [
                    {name: pytest.approx(value) for name, value in row.items()}
                    for row in expected["reward_components"]
                ]


def test_the_function_form_is_awaited(make_group: Callable[..., Any]) -> None:
    stage = RewardBridge({"base": {-1: 0}})
    group = make_group(("q", "x"), score=[-1.0])
    assert asyncio.run(stage(group)) == stage.now(group)
