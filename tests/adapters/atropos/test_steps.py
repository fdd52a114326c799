"""Which keys of a group go where, and where the rewards of steps end."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

import shmbridge
from shmbridge.producers.atropos.lane import WIRE, carried

GROUP = {
    "tokens": [[1, 2, 3, 4, 5, 6], [1, 2, 3]],
    "masks": [[-100, 2, 3, -100, -100, 6], [-100, -100, 3]],
    "scores": [1.0, 0.0],
}


def said(*rewards: list[Any]) -> list[list[dict[str, Any]]]:
    """Messages of which the assistant's have these rewards."""
    question = {"role": "user", "content": "?"}
    return [
        [
            each
            for reward in row
            for each in (question, {"role": "assistant", "content": "!", "reward": reward})
        ]
        for row in rewards
    ]


def test_rewards_stay_in_their_messages_unless_asked_for() -> None:
    group = {**GROUP, "messages": said([0.5, 1.0], [0.25])}
    assert carried(group).group == group
    assert carried({**GROUP, "step_rewards": [[0.5], [1.0]]}).group == {
        **GROUP,
        "extra": {"step_rewards": [[0.5], [1.0]]},
    }


def test_rewards_of_messages_end_where_their_turns_do() -> None:
    group = {**GROUP, "messages": said([0.5, 1.0], [0.25])}
    before = copy.deepcopy(group)
    took = carried(group, step_rewards=True)
    assert took.group == {**group, "step_rewards": [[0.5, 1.0], [0.25]], "step_ends": [[3, 6], [3]]}
    assert took.left_out == ()
    assert group == before


def test_rows_without_rewards_have_no_steps() -> None:
    took = carried({**GROUP, "messages": said([0.5, 1.0], [None])}, step_rewards=True)
    assert (took.group["step_rewards"], took.group["step_ends"]) == ([[0.5, 1.0], []], [[3, 6], []])
    for messages in (None, [], said([None], [None]), [[{"role": "user", "content": "?"}]] * 2):
        assert carried({**GROUP, "messages": messages}, step_rewards=True) == carried(
            {**GROUP, "messages": messages}
        )


def test_rewards_without_a_place_are_carried_without_ends_and_counted() -> None:
    took = carried({**GROUP, "messages": said([0.5], [0.25])}, step_rewards=True)
    assert took.group["step_rewards"] == [[0.5], [0.25]]
    assert "step_ends" not in took.group
    assert took.left_out == ("step_ends",)


@pytest.mark.parametrize("reward", ["good", math.nan, math.inf, True, 1e39, [1.0]])
def test_rewards_that_are_no_numbers_make_no_columns(reward: Any) -> None:
    took = carried({**GROUP, "messages": said([0.5, reward], [0.25])}, step_rewards=True)
    assert not {"step_rewards", "step_ends"} & set(took.group)
    assert took.left_out == ("step_rewards",)


def test_a_groups_own_step_rewards_come_first() -> None:
    own = {"step_rewards": [[1, 2.5], []], "step_ends": [[2, 6], []], "messages": said([9.0], [9.0])}
    assert carried({**GROUP, **own}, step_rewards=True) == carried({**GROUP, **own}, step_rewards=True)
    assert carried({**GROUP, **own}, step_rewards=True).group == {**GROUP, **own}
    odd = {"step_rewards": [[1.0], [2.0]], "step_ends": [[2], [-1]]}
    took = carried({**GROUP, **odd}, step_rewards=True)
    assert took.group == {
        **GROUP,
        "step_rewards": odd["step_rewards"],
        "extra": {"step_ends": odd["step_ends"]},
    }
    assert took.left_out == ("step_ends",)


BROKEN = [
    {"tokens": None},
    {"masks": None},
    {"masks": [1, 2]},
    {"masks": [[1]]},
    {"messages": 5},
    {"messages": [5, 6]},
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_group_is_left_to_the_lane_to_refuse(broken: dict[str, Any]) -> None:
    carried({**GROUP, "messages": said([0.5], [0.25]), **broken}, step_rewards=True)


def test_keys_of_their_own_do_not_become_columns_of_ours() -> None:
    own = {
        "temperature": 0.7,
        "rewards": ["a", "b"],
        "finish_reason": ["stop", "length"],
        "loss_mask": None,
        "extra": {"a": 1},
        "seed": 3,
    }
    assert not WIRE & set(own)
    assert carried({**GROUP, **own}).group == {**GROUP, "extra": own}


def test_own_keys_that_have_no_json_are_left_out_and_the_group_is_not(
    make_producer: Callable[..., Any], consumer: shmbridge.Consumer
) -> None:
    bad = {"nan": [{"x": math.nan}], "object": object(), "half": "\ud800", "bytes": b"x", "keys": {(1, 2): 3}}
    own = {**bad, "good": {"1": [None, "ä", 2**70]}}
    took = carried({**GROUP, **own})
    assert took.left_out == tuple(bad)
    make_producer().put(took.group, foreign=True)
    with consumer.get(5) as record:
        assert record.to_scored_data() == {**GROUP, "good": own["good"]}


def test_the_columns_are_those_of_the_record_and_come_back(
    make_producer: Callable[..., Any], consumer: shmbridge.Consumer
) -> None:
    group = {**GROUP, "messages": said([0.5, 1.0], [0.25])}
    make_producer().put(carried(group, step_rewards=True).group, foreign=True)
    with consumer.get(5) as record:
        assert [row.tolist() for row in record["step_rewards"]] == [[0.5, 1.0], [0.25]]
        assert [row.tolist() for row in record["step_ends"]] == [[3, 6], [3]]
        assert record.to_scored_data() == {
            **group,
            "step_rewards": [[0.5, 1.0], [0.25]],
            "step_ends": [[3, 6], [3]],
        }
        assert not record.meta.uneven
