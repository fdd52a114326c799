"""The seed recipe's keys, each accepted with its meaning or refused with the reason."""

import pytest
from omegaconf import OmegaConf
from verl_loop import configured

from shmbridge.consumers.trajectories import Credit
from shmbridge.consumers.verl.settings import Settings, longest_row, release_at


def of(**keys: object) -> Settings:
    return Settings.of(OmegaConf.create({"trainer": {"atropos": {"bridge": "run1", **keys}}}))


def test_the_recipes_own_block_is_taken_with_a_bridge_added():
    settings = of(
        api_url="http://localhost:9001", timeout=30, use_advantages=True, fallback_to_grpo=True,
        retry_attempts=10, retry_delay=0.5, max_wait_time=30.0,
    )  # fmt: skip
    assert settings.patience_s == 30
    assert settings.credit == Credit(use_own=True, fallback=True)


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({}, None),
        ({"max_wait_time": 600.0}, 600.0),
        ({"timeout": 5.0, "retry_attempts": 1}, 5.0),
        ({"timeout": 5.0, "retry_attempts": 2, "retry_delay": 1.0}, 11.0),
        ({"timeout": 5.0, "retry_attempts": 100, "max_wait_time": 60}, 60),
    ],
)
def test_a_step_waits_for_all_tries_together(limits, seconds):
    assert of(**limits).patience_s == seconds


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
        ({"release_at": "never"}, "release_at='never' is none of step, checkpoint"),
        ({"unfit": None}, "unfit=None is none of refuse, leave_out"),
        ({"start": "anew"}, "start='anew' is none of from-bridge, from-scratch"),
        ({"set_aside_after": -1}, "set_aside_after=-1 is no whole number"),
    ],
)
def test_what_cannot_be_is_refused_by_name(keys, words):
    with pytest.raises(ValueError, match=words):
        of(**keys)


ACTOR = "actor_rollout_ref.actor"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ulysses_sequence_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ([], None),
        (["+trainer.atropos.longest_row=9"], 9),
        ([*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=100"], 200),
        ([*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=100", "+trainer.atropos.longest_row=9"], 9),
        ([*DYNAMIC, "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=50"], 32768),
        ([*DYNAMIC, "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=50",
          "algorithm.rollout_correction.bypass_mode=False"], 100),
    ],
)  # fmt: skip
def test_the_longest_row_is_what_verls_dynamic_batches_take(overrides, longest):
    config = configured("run1", "no model", 3, overrides)
    assert longest_row(config, Settings.of(config)) == longest


@pytest.mark.parametrize(
    ("overrides", "released"),
    [
        ([], None),
        (["trainer.v1.trainer_mode=sync", "trainer.save_freq=2"], "step"),
        (["trainer.save_freq=2", "+trainer.atropos.release_at=step"], "step"),
        (["trainer.save_freq=2", "+trainer.atropos.release_at=checkpoint"], "checkpoint"),
    ],
)
def test_groups_are_released_with_checkpoints_where_the_trainer_tells_of_them(overrides, released):
    config = configured("run1", "no model", 3, overrides)
    assert release_at(config, Settings.of(config)) == released
