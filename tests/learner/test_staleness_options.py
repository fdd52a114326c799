"""What the consumer is told of the learner's limits on staleness."""

import pytest

from shmbridge.consumers.learner.config.grpo_options import parser
from shmbridge.consumers.learner.config.staleness_options import BadLimit, consumer_arguments


def told(*flags: str) -> dict:
    return consumer_arguments(
        parser().parse_args(["--bridge", "b", "--model", "m", "--steps", "1", "--groups", "8", *flags])
    )


def test_without_a_limit_batches_are_fair():
    assert told() == {"policy": "fair", "max_off_policy_steps": None, "groups_per_step": None}
    assert told("--policy", "atropos")["policy"] == "atropos"


def test_a_limit_takes_the_oldest_first_and_is_for_the_groups_of_a_step():
    assert told("--max-off-policy-steps", "2") == {
        "policy": "oldest",
        "max_off_policy_steps": 2,
        "groups_per_step": 8,
    }


def test_an_order_that_would_break_the_limit_is_refused():
    with pytest.raises(BadLimit, match="leave --policy atropos out"):
        told("--max-off-policy-steps", "2", "--policy", "atropos")


@pytest.mark.parametrize("flag", ["--max-off-policy-steps", "--max-staleness", "--max-token-staleness"])
def test_a_limit_that_nothing_could_keep_until_the_next_version_is_refused(flag):
    with pytest.raises(
        BadLimit,
        match=f"are 3 steps old before the next version, and {flag} is 2: raise {flag} to 3, or .* to 3",
    ):
        told("--publish-every", "4", flag, "2")
    told("--publish-every", "4", flag, "3")
