"""What each TRL option does to a bridge's rows: refused, replaced by the adapter, or kept."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from transformers import TrainingArguments
from trl import GRPOConfig
from trl.experimental.async_grpo import AsyncGRPOConfig

from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func
from shmbridge.consumers.trl.grpo import REFUSED
from tests.trainers.option_table import accounted_for
from tests.trainers.trl.target_groups import group

LOSS = "as the bridge: TRL's loss, of the bridge's advantages, masks and log-probabilities"
MODEL = "no effect: the model, and how it is computed"
SAMPLING = "no effect: TRL generates nothing"
LOG = "no effect: of TRL's log"
TABLE = {
    LOSS: """
        beta num_iterations epsilon epsilon_high delta loss_type importance_sampling_level temperature
        sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
        sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef
        use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        use_bias_correction_kl max_completion_length router_aux_loss_coef""",
    "as the bridge: a sequence's tokens of negative advantage, by the sampler's log-probabilities": """
        off_policy_mask_threshold""",
    "as the bridge: by finish_reason": "mask_truncated_completions",
    "as the bridge: whole groups, held until their last step": """
        num_generations generation_batch_size steps_per_generation shuffle_dataset pad_to_multiple_of""",
    "no effect: of TRL's own advantages, which only its log shows": """
        reward_weights multi_objective_aggregation scale_rewards""",
    SAMPLING: """
        top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation
        ds3_gather_for_generation num_generations_eval max_tool_calling_iterations
        use_transformers_continuous_batching transformers_continuous_batching_config
        use_transformers_paged""",
    "no effect: use_vllm is refused": """
        vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        vllm_importance_sampling_cap""",
    MODEL: "model_init_kwargs trust_remote_code disable_dropout cast_lm_head_to_fp32",
    LOG: """
        log_completions log_multimodal num_completions_to_print log_unique_prompts
        log_completions_hub_repo""",
}
ASYNC = {
    LOSS: "temperature epsilon epsilon_high router_aux_loss_coef",
    "as the bridge: samples of its rows, by their oldest versions": """
        num_generations token_budget max_staleness weight_sync_steps heartbeat_stale_after_s""",
    SAMPLING: """
        max_completion_length top_p top_k min_p repetition_penalty chat_template_kwargs
        max_tool_calling_iterations fork_threshold_tokens request_timeout max_inflight_tasks queue_maxsize
        vllm_server_base_url vllm_server_timeout weight_sync_timeout""",
    MODEL: "model_init_kwargs trust_remote_code dtype",
    LOG: "log_completions num_completions_to_print",
}


@pytest.mark.parametrize(("config", "table"), [(GRPOConfig, TABLE), (AsyncGRPOConfig, ASYNC)])
def test_every_option_of_trl_is_refused_or_in_the_table(config, table):
    inherited = {field.name for field in fields(TrainingArguments)}
    own = {field.name for field in fields(config)} - inherited
    refused = [each for each in REFUSED if config is GRPOConfig]
    assert {each.key for each in refused} <= own | inherited
    accounted_for(own, [each for each in refused if each.key not in inherited], table)


class Seen(ShmGRPOTrainer):
    """Keeps what TRL's own loss is called with."""

    def _compute_loss(self, model, inputs):
        self.seen = {name: value.clone() for name, value in inputs.items()}
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(("recorded", "version", "stale"), [(False, 0, 4), (True, 0, 0), (False, 4, 0)])
def test_stale_rows_that_count_as_fresh_are_named(
    bridge, tiny, settings, make_producer, caplog, recorded, version, stale
):
    logprobs = {"inference_logprobs": [np.full(7, -2.0, np.float32)] * 4} if recorded else {}
    with shm_rollout_func(bridge, timeout_s=30) as rollouts:
        trainer = Seen(tiny, args=settings(), rollout_func=rollouts)
        make_producer(lane_bytes="1M").put(group(0, **logprobs), policy_version=version)
        rollouts.publish(3)
        trainer.train()
        stats = rollouts.stats()
    assert stats["trl_rows_stale_as_fresh_total"] == stale
    said = [each.message for each in caplog.records if "as if fresh" in each.message]
    assert len(said) == bool(stale)
    if stale:
        assert "4 rows of a step" in said[0]
        assert said[0].endswith("-> have environments record inference_logprobs")
    old = trainer.seen.get("old_per_token_logps")
    assert (old is not None and torch.equal(old, torch.full_like(old, -2.0))) == recorded
