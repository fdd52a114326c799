"""The limits on staleness that the learner's options give its consumer."""

from unittest.mock import Mock

import pytest

import shmbridge
from shmbridge.consumers.learner.config.checks import BadLimit, refuse_unreachable_limits
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.data import sources


@pytest.fixture
def told(monkeypatch):
    """Return a function from flags to the feed's arguments that these flags set."""
    opened = Mock()
    monkeypatch.setattr(sources, "Feed", opened)

    def told(*flags):
        config = parse(["--bridge", "b", "--model", "m", "--steps", "1", "--groups", "8", *flags])
        refuse_unreachable_limits(config)
        sources.feed_of(config, shmbridge.Run(), lambda group: True)
        return {
            name: opened.call_args.kwargs[name]
            for name in ("policy", "max_off_policy_steps", "groups_per_step")
        }

    return told


def test_batches_without_a_limit_are_fair(told):
    assert told() == {"policy": "fair", "max_off_policy_steps": None, "groups_per_step": None}
    assert told("--policy", "atropos")["policy"] == "atropos"


def test_a_limit_takes_the_oldest_first_and_is_for_the_groups_of_a_step(told):
    assert told("--max-off-policy-steps", "2") == {
        "policy": "oldest",
        "max_off_policy_steps": 2,
        "groups_per_step": 8,
    }


def test_an_order_that_would_break_the_limit_is_refused(told):
    with pytest.raises(BadLimit, match="leave --policy atropos out"):
        told("--max-off-policy-steps", "2", "--policy", "atropos")


@pytest.mark.parametrize("flag", ["--max-off-policy-steps", "--max-staleness", "--max-token-staleness"])
def test_a_limit_that_nothing_could_keep_until_the_next_version_is_refused(told, flag):
    with pytest.raises(
        BadLimit,
        match=f"are 3 steps old before the next version, and {flag} is 2: raise {flag} to 3, or .* to 3",
    ):
        told("--publish-every", "4", flag, "2")
    told("--publish-every", "4", flag, "3")
