"""What each option of SkyRL's config does to a bridge's rows, and what of it is refused."""

import re
from dataclasses import fields, is_dataclass

import pytest

from tests.trainers.option_table import accounted_for

WATCHED = re.compile(
    r"trainer\.(algorithm|fully_async)\.|generator\.\w+$|trainer\..*(reward|advantage|mask|filter|logprob|stale)"
)
ALGORITHM, CORRECTION = "trainer.algorithm", "trainer.algorithm.off_policy_correction"
TABLE = {
    "as the bridge: SkyRL's loss, of the bridge's advantages and masks": f"""
        {ALGORITHM}.policy_loss_type {ALGORITHM}.loss_reduction {ALGORITHM}.max_seq_len
        {ALGORITHM}.eps_clip_low {ALGORITHM}.eps_clip_high {ALGORITHM}.clip_ratio_c {ALGORITHM}.use_kl_loss
        {ALGORITHM}.kl_loss_coef {ALGORITHM}.kl_estimator_type {ALGORITHM}.use_entropy_loss
        {ALGORITHM}.entropy_loss_coef {ALGORITHM}.temperature {ALGORITHM}.sapo.tau_pos
        {ALGORITHM}.sapo.tau_neg {ALGORITHM}.clip_cov.clip_ratio {ALGORITHM}.clip_cov.clip_cov_lb
        {ALGORITHM}.clip_cov.clip_cov_ub {ALGORITHM}.kl_cov.kl_cov_frac {ALGORITHM}.kl_cov.ppo_kl_coef
        {ALGORITHM}.cispo.cispo_eps_clip_low {ALGORITHM}.cispo.cispo_eps_clip_high
        {ALGORITHM}.dppo.dppo_type {ALGORITHM}.dppo.delta_low {ALGORITHM}.dppo.delta_high""",
    "as the bridge: weights or masks by the sampler's log-probabilities": f"""
        {CORRECTION}.tis_ratio_type {CORRECTION}.token_tis_ratio_clip_high
        {CORRECTION}.sequence_tis_ratio_clip_high {CORRECTION}.sequence_mask_metric
        {CORRECTION}.geo_mask_high {CORRECTION}.geo_mask_low {CORRECTION}.product_mask_high
        {CORRECTION}.product_mask_low {CORRECTION}.outlier_token_is_threshold_low
        {CORRECTION}.outlier_token_is_threshold_high {CORRECTION}.token_mask_is_threshold_low
        {CORRECTION}.token_mask_is_threshold_high {ALGORITHM}.cispo.cispo_anchor
        {ALGORITHM}.use_tis {ALGORITHM}.tis_imp_ratio_cap""",
    "as the bridge: by finish_reason": "generator.apply_overlong_filtering",
    "as the bridge: whole groups, rows of an episode by its columns": """
        generator.n_samples_per_prompt generator.step_wise_trajectories""",
    "as the bridge: by the versions of the groups": """
        trainer.fully_async.enabled trainer.fully_async.max_staleness_steps
        trainer.fully_async.num_parallel_generation_workers trainer.fully_async.simulate_training
        trainer.fully_async.simulate_training_step_seconds
        trainer.fully_async.simulate_weight_sync_seconds""",
    "no effect: the estimator hands the bridge's advantages through": f"""
        {ALGORITHM}.gamma {ALGORITHM}.lambd {ALGORITHM}.grpo_norm_by_std {ALGORITHM}.value_clip
        {ALGORITHM}.value_head_prefix""",
    "no effect: of a setting that is refused": f"""
        {ALGORITHM}.kl_ctrl.type {ALGORITHM}.kl_ctrl.kl_target {ALGORITHM}.kl_ctrl.horizon
        {ALGORITHM}.dynamic_sampling.max_sample_batches {ALGORITHM}.dynamic_sampling.min_replace_ratio
        {ALGORITHM}.zero_variance_filter_tol generator.eval_n_samples_per_prompt""",
    "no effect: SkyRL generates nothing": """
        generator.batched generator.max_turns generator.max_input_length generator.chat_template_kwargs
        generator.use_conversation_multi_turn generator.append_eos_token_after_stop_str_in_multi_turn
        generator.use_cache_salt generator.vision_language_generator
        trainer.fully_async.clear_kv_cache_on_weight_sync""",
    "no effect: how SkyRL computes, not what": """
        trainer.recompute_old_logprobs_per_minibatch trainer.logprobs_chunk_size
        trainer.fused_lm_head_logprob trainer.fused_lm_head_logprob_backend""",
}

NEW_IN_0_4 = {f"{ALGORITHM}.cispo.cispo_anchor", f"{ALGORITHM}.enable_sample_support_replay"}


def leaves(config, above=""):
    """Keys of every leaf of a config; a section that may be None is one."""
    for each in fields(config):
        value, path = getattr(config, each.name), f"{above}.{each.name}" if above else each.name
        if is_dataclass(value):
            yield from leaves(value, path)
        else:
            yield path


def test_every_option_of_skyrl_is_refused_or_in_the_table(example):
    from skyrl.train.config.config import SkyRLTrainConfig

    from shmbridge.consumers.skyrl.config import REFUSED

    options = {key for key in leaves(SkyRLTrainConfig()) if WATCHED.match(key)} - {
        "generator.eval_sampling_params"
    }
    of_other_kinds = {each.key for each in REFUSED if not WATCHED.match(each.key)}
    assert of_other_kinds <= set(leaves(SkyRLTrainConfig()))
    accounted_for(options | of_other_kinds | NEW_IN_0_4, REFUSED, TABLE)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("trainer.algorithm.advantage_estimator=grpo", "advantage_estimator=shmbridge"),
        ("trainer.algorithm.advantage_batch_normalize=true", "advantage_batch_normalize=false"),
        ("trainer.algorithm.dynamic_sampling.type=filter", "dynamic_sampling.type=null"),
        ("trainer.algorithm.zero_variance_filter=true", "zero_variance_filter=false"),
        ("trainer.fully_async.sample_full_batch=true", "sample_full_batch=false"),
        ("trainer.algorithm.use_kl_in_reward=true", "use_kl_loss=true"),
        ("trainer.placement.colocate_all=true", "colocate_all=false"),
        ("trainer.eval_interval=5", "eval_interval=-1"),
        ("trainer.policy.model.lora.rank=8", "lora.rank=0"),
        ("generator.merge_stepwise_output=true", "merge_stepwise_output=false"),
        ("generator.zero_reward_on_non_stop=true", "zero_reward_on_non_stop=false"),
    ],
)
def test_settings_that_would_train_something_else(example, tiny, setting, says):
    from shmbridge.consumers.skyrl.config import ConfigDoesNotFit, check

    check(example.config(tiny, "run1", 2))
    key, value = setting.split("=")
    with pytest.raises(ConfigDoesNotFit, match=f"{key}={value}: .* -> .*{says}".replace("=true:", "=True:")):
        check(example.config(tiny, "run1", 2, setting))
