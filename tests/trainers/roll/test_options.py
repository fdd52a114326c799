"""What each option of ROLL's configuration does to a bridge's rows, and what of it is refused."""

from types import SimpleNamespace

import pytest

import shmbridge
from shmbridge.consumers.roll.env_manager import REFUSED, REFUSED_BY_PIPELINE
from shmbridge.consumers.roll.pipeline import ShmAgenticPipeline
from tests.trainers.option_table import accounted_for
from tests.trainers.roll.conftest import Queue

WORKER = "shmbridge.consumers.roll.actor_worker.ShmActorWorker"
CORRECTION, MANAGER = "train_infer_correction", "train_env_manager"
TABLE = {
    "as the bridge: ROLL's loss, of the bridge's advantages and masks": """
        ppo_epochs max_grad_norm l2 pg_clip use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss
        ratio_type use_kl_loss kl_loss_coef entropy_loss_coef loss_agg_mode enable_reference""",
    "as the bridge: compares with the sampler's log-probabilities, in place of a ratio to them": f"""
        {CORRECTION} {CORRECTION}.is_weight {CORRECTION}.filters {CORRECTION}.is_weight.enabled
        {CORRECTION}.is_weight.weight_type {CORRECTION}.is_weight.upper_bound
        {CORRECTION}.is_weight.detach""",
    "as the bridge: a group is one rollout of ROLL, a row of the bridge is one of its rows": f"""
        {MANAGER} {MANAGER}.num_env_groups {MANAGER}.group_size {MANAGER}.tags {MANAGER}.num_groups_partition
        {MANAGER}.max_traj_per_env {MANAGER}.max_env_num_per_worker {MANAGER}.group_filter_cls
        batch_adjust_mode async_generation_ratio custom_envs""",
    "no effect: old log-probabilities are replaced by the sampler's": """
        enable_old_logprobs_recompute force_disable_old_logprobs_recompute""",
    "no effect: of advantages that ROLL makes of rewards": """
        lambd gamma reward_clip whiten_rewards reward_normalization reward_normalization.grouping
        reward_normalization.method reward_normalization.norm_mean_type reward_normalization.norm_std_type
        reward_normalization.global_scale_factor reward_normalization.global_shift_value
        episode_reward_weight step_reward_weight step_reward_gamma value_clip""",
    "no effect: of a setting that is refused": "kl_penalty target_kl init_kl_coef kl_horizon",
    "no effect: ROLL's agentic pipeline does not read it": f"""
        use_reward_scaling use_reward_norm add_len_reward norm_mean_type norm_std_type dirty_data_mask
        open_feedback_turn use_token_reward {MANAGER}.format_penalty""",
    "no effect: ROLL generates and scores nothing": f"""
        {MANAGER}.llm_proxy reward reward_pretrain val_env_manager env_monitor render_save_dir exp_mode
        parse_tool_call_parameter_to_dict skip_mock_system_prompt""",
    "no effect: models and workers": """
        pretrain actor_train actor_infer critic reference teacher student_train student_infer
        pure_opd_pipeline_type partial_gpu_mode""",
}


def test_every_option_of_roll_is_refused_or_in_the_table(recorded):
    """Of the recorded interface, which test_interface.py holds to the checkout."""
    accounted_for(recorded["options"], (*REFUSED, *REFUSED_BY_PIPELINE), TABLE)


def config(key: str, value: object, worker: str = "") -> SimpleNamespace:
    """ROLL's configuration with one setting."""
    made = SimpleNamespace(adv_estimator="grpo", actor_train=SimpleNamespace(worker_cls=worker))
    *above, name = key.split(".")
    at = made
    for each in above:
        setattr(at, each, SimpleNamespace())
        at = getattr(at, each)
    setattr(at, name, value)
    return made


BY_ALL = [("train_env_manager.group_size_redundancy", 2, "redundancy: 0"), ("critic_warmup", 5, "warmup: 0")]
BY_WORKER = [
    ("whiten_advantages", True, "ShmAgenticPipeline"),
    ("advantage_clip", 5.0, "ShmAgenticPipeline"),
    ("use_opd", True, "ShmAgenticPipeline"),
    ("is_pure_opd", True, "ShmAgenticPipeline"),
    ("add_token_level_kl", True, "use_kl_loss: true"),
]
BY_PIPELINE = [("adv_estimator", "gae", "adv_estimator: grpo"), BY_WORKER[-1]]


@pytest.mark.parametrize(("key", "value", "words"), BY_ALL + BY_PIPELINE)
def test_the_pipeline_refuses_what_roll_would_do_wrongly(key, value, words):
    with pytest.raises(shmbridge.BadArgument, match=f"{key}={value}: .* -> .*{words}"):
        ShmAgenticPipeline(config(key, value))


@pytest.mark.parametrize(("key", "value", "words"), BY_ALL + BY_WORKER)
def test_so_does_the_environment_manager_of_the_actors_hook(make_manager, key, value, words):
    with pytest.raises(shmbridge.BadArgument, match=f"{key}={value}: .* -> .*{words}"):
        make_manager(Queue(1), pipeline=vars(config(key, value, WORKER)))


@pytest.mark.parametrize(("key", "value", "words"), BY_WORKER)
def test_what_the_pipeline_applies_to_the_bridges_advantages_is_taken(make_manager, key, value, words):
    make_manager(Queue(1), pipeline=vars(config(key, value)))


def test_a_critic_may_warm_up_where_it_is_trained(make_manager):
    make_manager(Queue(1), pipeline=vars(config("critic_warmup", 5)) | {"adv_estimator": "gae"})
