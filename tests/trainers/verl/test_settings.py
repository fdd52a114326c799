"""The seed recipe's keys, each accepted with its meaning or refused with the reason."""

import math

import pytest
from omegaconf import OmegaConf

from shmbridge.consumers.trajectories import Credit
from shmbridge.consumers.verl.settings import Settings


def of(**keys: object) -> Settings:
    return Settings.of(OmegaConf.create({"trainer": {"atropos": {"bridge": "run1", **keys}}}))


def test_the_recipes_own_block_is_taken_with_a_bridge_added():
    settings = of(
        api_url="http://localhost:9001", timeout=30, use_advantages=True, fallback_to_grpo=True,
        retry_attempts=10, retry_delay=0.5, max_wait_time=30.0,
    )  # fmt: skip
    patience = settings.patience
    assert (patience.timeout_s, patience.attempts, patience.retry_delay_s, patience.max_wait_s) == (
        30,
        10,
        0.5,
        30,
    )
    assert settings.credit == Credit(use_own=True, fallback=True)


def test_without_limits_a_step_waits_for_ever_and_one_limit_leaves_the_total_open():
    assert of().patience is None
    assert of(timeout=5.0).patience.max_wait_s == math.inf


def test_the_other_recipes_advantage_keys_shape_the_credit():
    credit = of(advantage_normalization="batch", advantage_clipping=[-5.0, 5.0], use_advantages=False).credit
    assert (credit.normalise, credit.clip, credit.use_own) == ("batch", (-5.0, 5.0), False)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"use_advantage_weighting": True}, "loss_mode=gpg"),
        ({"advantage_normalization": "always"}, "none, batch, global"),
        ({"use_advantages": False, "fallback_to_grpo": False}, "set one of them to true"),
        ({"bridge": ""}, "trainer.atropos.bridge=run1"),
        ({"apiurl": "x"}, "use one of bridge"),
    ],
)
def test_what_cannot_be_is_refused_by_name(keys, words):
    with pytest.raises(ValueError, match=words):
        of(**keys)
