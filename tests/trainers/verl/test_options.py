"""What each option of verl's configuration does to a bridge's rows; its own estimators."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl_loop import configured

from shmbridge.consumers.trajectories import trajectories
from shmbridge.consumers.verl.agent_loop_manager import Form, NoScore, rows_of
from shmbridge.consumers.verl.settings import NAMES, REFUSED, compares_with_sampler, form_of
from tests.trainers.option_table import accounted_for

SECTIONS = re.compile(
    r"(algorithm|trainer\.v1\.sampler|actor_rollout_ref\.actor\.policy_loss|reward)\."
    r"|(actor_rollout_ref\.actor|distillation)\.\w+$"
)
WORDS = re.compile(r"reward|advantage|mask|(?<!pre)filter|log_?prob|off_policy|_refill|adv_|critic_warmup")
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
TABLE = {
    "as the bridge: verl's loss, of the bridge's advantages and masks": f"""
        {ACTOR}.clip_ratio {ACTOR}.clip_ratio_low {ACTOR}.clip_ratio_high {ACTOR}.clip_ratio_c {ACTOR}.tau_pos
        {ACTOR}.tau_neg {ACTOR}.loss_agg_mode {ACTOR}.loss_scale_factor {ACTOR}.entropy_coeff
        {ACTOR}.use_kl_loss {ACTOR}.kl_loss_coef {ACTOR}.kl_loss_type {ACTOR}.grad_clip {ACTOR}.ppo_epochs
        {ACTOR}.policy_loss.loss_mode {ACTOR}.policy_loss.clip_cov_ratio {ACTOR}.policy_loss.clip_cov_lb
        {ACTOR}.policy_loss.clip_cov_ub {ACTOR}.policy_loss.kl_cov_ratio {ACTOR}.policy_loss.ppo_kl_coef
        {ACTOR}.policy_loss.dro_beta""",
    "as the bridge: whole groups, and rows of padding up to them": f"""
        {ACTOR}.ppo_mini_batch_size {ACTOR}.ppo_micro_batch_size {ACTOR}.ppo_micro_batch_size_per_gpu
        {ACTOR}.use_dynamic_bsz {ACTOR}.ppo_max_token_len_per_gpu {ACTOR}.shuffle {ACTOR}.data_loader_seed
        {ACTOR}.rollout_n""",
    "as the bridge: the sampler's log-probabilities, as old ones or as weights beside verl's": f"""
        {CORRECTION}.bypass_mode {CORRECTION}.loss_type {CORRECTION}.rollout_is_threshold
        {CORRECTION}.rollout_rs_threshold {CORRECTION}.rollout_is_batch_normalize
        actor_rollout_ref.rollout.calculate_log_probs""",
    "as the bridge: own estimators get the score, on the last trained token": """
        algorithm.adv_estimator algorithm.gamma algorithm.lam algorithm.norm_adv_by_std_in_grpo
        algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.horizon
        algorithm.kl_ctrl.target_kl algorithm.use_pf_ppo algorithm.pf_ppo.reweight_method
        algorithm.pf_ppo.weight_pow""",
    "as the bridge: what the filter drops is released, and counted as cleared": """
        algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches
        algorithm.filter_groups.max_inflight_gen_batches""",
    "as the bridge: by the versions of the groups": """
        trainer.v1.sampler.max_off_policy_threshold trainer.v1.sampler.max_off_policy_strategy
        trainer.v1.sampler.custom_sampler.path trainer.v1.sampler.custom_sampler.name
        trainer.v1.sampler.sampler_kwargs""",
    "as the bridge: keys of our own": """
        trainer.atropos.use_advantages trainer.atropos.max_off_policy_steps""",
    "no effect: of verl's synchronous mode": "trainer.v1.sampler.sync_refill_failed_groups",
    "no effect: verl's reward workers are not asked": """
        reward.num_workers reward.custom_reward_function.name reward.reward_manager.source
        reward.reward_manager.name reward.reward_manager.module.name reward.sandbox_fusion.url
        reward.sandbox_fusion.max_concurrent reward.sandbox_fusion.memory_limit_mb
        reward.reward_model.enable_resource_pool reward.reward_model.n_gpus_per_node
        reward.reward_model.nnodes reward.reward_model.model_path custom_reward_function.path
        custom_reward_function.name data.reward_fn_key""",
    "no effect: distillation is refused": """
        distillation.n_gpus_per_node distillation.nnodes distillation.teacher_key
        distillation.distillation_loss.use_task_rewards distillation.distillation_loss.log_prob_min_clamp""",
    "no effect: of prompts of verl's own": """
        data.filter_overlong_prompts data.filter_overlong_prompts_workers""",
    "no effect: the v1 trainer does not read it": f"""
        {ACTOR}.use_prefix_grouper {ACTOR}.calculate_sum_pi_squared""",
    "no effect: how verl computes, not what": f"""
        {ACTOR}.strategy {ACTOR}.freeze_vision_tower {ACTOR}.calculate_entropy {ACTOR}.use_torch_compile
        {ACTOR}.use_fused_kernels {ACTOR}.ulysses_sequence_parallel_size {ACTOR}.entropy_checkpointing
        {ACTOR}.entropy_from_logits_with_chunking {ACTOR}.entropy_from_logits_chunk_size
        {ACTOR}.pad_to_length {ACTOR}.use_remove_padding actor_rollout_ref.rollout.logprobs_mode
        actor_rollout_ref.rollout.log_prob_micro_batch_size
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
        actor_rollout_ref.ref.log_prob_micro_batch_size actor_rollout_ref.ref.log_prob_use_dynamic_bsz
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
        actor_rollout_ref.ref.log_prob_max_token_len_per_gpu""",
}  # fmt: skip


def leaves(tree, above=""):
    """Keys of every leaf of a configuration, with dots."""
    for key, value in tree.items():
        path = f"{above}.{key}" if above else key
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        elif key != "_target_":
            yield path


def test_every_option_of_verl_is_refused_or_in_the_table():
    config = OmegaConf.to_container(configured("run1", "no model", 3, []), resolve=False)
    options = [
        key
        for key in leaves(config)
        if not key.startswith("reward_model.")
        and "reward_model.rollout." not in key
        and (SECTIONS.match(key) or WORDS.search(key))
    ]
    accounted_for(options, REFUSED, TABLE)


FILTER = "algorithm.filter_groups.enable=True"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.use_kl_in_reward=True"], "use_kl_in_reward=True: it changes.*use_kl_loss=True"),
        ([FILTER, "algorithm.filter_groups.metric=reward"], "metric=reward: .*-> .*metric=score"),
        ([f"{CORRECTION}.rollout_is=token"], "rollout_is=token: .*-> .*bypass_mode=False"),
        ([f"{CORRECTION}.rollout_rs=seq_mean_k1"], "rollout_rs=seq_mean_k1: .*-> .*bypass_mode=False"),
        (["reward.reward_model.enable=True"], "-> reward.reward_model.enable=False"),
        (["reward.custom_reward_function.path=mine.py"], "=mine.py: .*-> .*function.path=null"),
        (["reward.reward_manager.module.path=mine.py"], "-> reward.reward_manager.module.path=null"),
        (["trainer.critic_warmup=2"], "critic_warmup=2: .*untrained -> trainer.critic_warmup=0"),
        (["distillation.enabled=True"], "-> distillation.enabled=False"),
    ],
)  # fmt: skip
def test_what_verl_would_do_wrongly_is_refused_with_the_reason(overrides, words):
    with pytest.raises(ValueError, match=words):
        form_of(configured("run1", "no model", 3, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [FILTER, "algorithm.filter_groups.metric=score"],
        [FILTER, "algorithm.filter_groups.metric=reward", "algorithm.adv_estimator=grpo"],
        ["algorithm.use_kl_in_reward=True", "algorithm.adv_estimator=rloo"],
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.bypass_mode=False"],
        ["trainer.critic_warmup=2", "algorithm.adv_estimator=gae"],
    ],
)
def test_what_verl_does_rightly_is_not_refused(overrides):
    form_of(configured("run1", "no model", 3, overrides))


def test_the_example_compares_with_the_sampler():
    assert compares_with_sampler(configured("run1", "no model", 3, []))
    assert not compares_with_sampler(configured("run1", "no model", 3, [f"{CORRECTION}.bypass_mode=False"]))


SCORES = [0.5, -1.25, 2.0, -0.5]
MASKS = [[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 0]]


@pytest.fixture
def rows(bridge, consumer, producer):
    """`rows(form, **columns)`: verl's rows of one group; three of four end in untrained tokens."""

    def made(form, **columns):
        producer.put(
            {
                "tokens": [list(range(3, 9))] * 4,
                "prompt_length": [2] * 4,
                "loss_mask": MASKS,
                "score": SCORES,
                "advantages": [[0.5 * each for each in row] for row in MASKS],
                **columns,
            }
        )
        batch = next(consumer.batches(groups=1, timeout_s=10))
        with batch:
            return rows_of(trajectories(batch)[0], ["u"], [(0, 0)], form)

    return made


SCORED = Form(per_token=False, scored=False, logprobs=False, temperature=1.0)


def own_estimators():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return sorted(set(ADV_ESTIMATOR_REGISTRY) - set(NAMES))


# Estimators that need what verl's v1 trainer does not make: with or without a bridge they end in an error.
NOT_IN_V1 = {"remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"}


@pytest.mark.parametrize("name", own_estimators())
def test_verls_own_estimators_find_the_score_of_a_row_that_ends_untrained(rows, name):
    """As if all rows ended in a trained token, which holds the score: nothing depends on what follows it."""
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.ray_trainer import compute_advantage

    given = rows(SCORED).fields["rm_scores"]
    mask = torch.tensor([row[2:] for row in MASKS])
    assert [row.nonzero().flatten().tolist() for row in given] == [[3], [1], [2], [2]]
    wanted = torch.zeros(4, 4)
    wanted[range(4), [3, 1, 2, 2]] = torch.tensor(SCORES)
    advantages = {}
    for of, rewards in {"given": torch.stack(list(given)), "wanted": wanted}.items():
        tensors = {"token_level_rewards": rewards, "response_mask": mask, "values": torch.zeros(4, 4)}
        data = DataProto.from_dict(tensors, non_tensors={"uid": np.array(["u"] * 4, object)})
        config = AlgoConfig(adv_estimator=name, gamma=1.0, lam=1.0)
        try:
            advantages[of] = compute_advantage(data, name, config=config).batch["returns"] * mask
        except (AssertionError, TypeError, KeyError, ValueError):
            assert name in NOT_IN_V1, name
            return
    assert name not in NOT_IN_V1, f"verl feeds {name} now -> take it out"
    assert torch.equal(advantages["given"], advantages["wanted"])
    assert (advantages["given"].abs().sum(1) > 0).sum() >= 1
    if name in ("gae", "reinforce_plus_plus"):
        assert torch.equal(advantages["given"], torch.tensor(SCORES)[:, None] * mask)


def test_a_filter_by_score_finds_it_and_a_row_without_one_is_named(rows):
    filtered = Form(per_token=True, scored=True, logprobs=False, temperature=1.0)
    made = rows(filtered, reward_components=[{"format": 1.0}] * 4)
    infos = [extra["reward_extra_info"] for extra in made.fields["extra_fields"]]
    assert infos == [{"format": 1.0, "score": score} for score in SCORES]
    with pytest.raises(NoScore, match=r"row 0 of group .* has no score.*filter_groups"):
        rows(filtered, score=[None] * 4)
