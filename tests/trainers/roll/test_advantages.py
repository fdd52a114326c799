"""The advantages of the bridge replace ROLL's, in its pipeline or in its loss; bad ones are refused."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.consumers.roll.actor_worker import PARAMETERS, check_signature, installed, with_precomputed


@pytest.fixture
def compute():
    """ROLL's agentic_compute_advantage."""
    from roll.pipeline.agentic.agentic_pipeline import agentic_compute_advantage

    return agentic_compute_advantage


def batch_of(advantages: torch.Tensor | None, sampled: torch.Tensor | None = None, **meta):
    """Two rows of five tokens, three of them trained, each with a reward on its last token."""
    from roll.distributed.scheduler.protocol import DataProto

    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 1, 1]], dtype=torch.bool)
    rewards = torch.zeros(2, 4)
    rewards[:, -1] = torch.tensor([1.0, -1.0])
    tensors = {"response_mask": mask, "token_level_rewards": rewards}
    if advantages is not None:
        tensors["shm_advantages"] = advantages
    if sampled is not None:
        tensors["infer_logprobs"] = sampled
    objects = {"shm_step": [1, 3], "sample_uuid": ["a", "b"]}
    objects = {name: np.array(values, dtype=object) for name, values in objects.items()}
    return DataProto.from_dict(tensors, non_tensors=objects, meta_info=meta)


ARGUMENTS = {"gamma": 1.0, "lambd": 1.0, "adv_estimator": "grpo"}
OWN = torch.tensor([[9.0, 0.5, -0.25, 2.0], [-1.0, 9.0, 0.125, -3.0]])
TRAINED = OWN * torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1]])


def test_the_tested_signature_is_that_of_roll(compute, recorded):
    name = "roll.pipeline.agentic.agentic_pipeline:agentic_compute_advantage"
    assert list(PARAMETERS) == recorded["signatures"][name] == list(inspect.signature(compute).parameters)


def test_without_the_column_rolls_own_is_returned(compute):
    mine = with_precomputed(compute)(data=batch_of(None), **ARGUMENTS)
    rolls = compute(data=batch_of(None), **ARGUMENTS)
    assert torch.equal(mine.batch["advantages"], rolls.batch["advantages"])
    assert mine.batch["advantages"].abs().sum() > 0


def test_the_column_arrives_position_by_position(compute):
    done = with_precomputed(compute)(data=batch_of(OWN, global_step=4), **ARGUMENTS)
    assert torch.equal(done.batch["advantages"], TRAINED)
    assert not torch.equal(done.batch["advantages"], TRAINED.roll(1, 1)), "one position later they differ"
    assert done.batch["token_level_rewards"].sum(-1).tolist() == [1.0, -1.0], "rewards stay ROLL's"
    assert done.meta_info["metrics"]["shm/steps_late/max"] == 3.0
    assert done.meta_info["metrics"]["shm/steps_late/mean"] == 2.0


def test_rolls_own_code_on_the_way_returns_them_unchanged(compute):
    """What the wrapper relies on: estimator grpo without discount gives token rewards back."""
    data = batch_of(None)
    data.batch["token_level_rewards"] = OWN.clone()
    done = compute(data=data, gamma=0.0, lambd=1.0, adv_estimator="grpo")
    assert torch.equal(done.batch["advantages"], TRAINED)
    with_discount = compute(data=batch_of(None), gamma=1.0, lambd=1.0, adv_estimator="grpo")
    assert with_discount.batch["advantages"].tolist() == [[0, 1, 1, 1], [-1, 0, -1, -1]], (
        "a row's score, on all"
    )


def test_clipping_applies_as_configured(compute):
    done = with_precomputed(compute)(data=batch_of(OWN), **ARGUMENTS, advantage_clip=1.0)
    assert torch.equal(done.batch["advantages"], TRAINED.clamp(-1, 1))


def test_whitening_applies_as_configured(compute, needs_checkout):
    done = with_precomputed(compute)(data=batch_of(OWN), **ARGUMENTS, whiten_advantages=True)
    values = done.batch["advantages"][TRAINED != 0]
    assert values.mean().abs() < 1e-6
    assert values.std() == pytest.approx(1.0, abs=1e-3)


SAMPLED = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, -7.0, -8.0]])


def correction(weighted: bool, *filters: bool):
    """A part of ROLL's configuration: its own comparison with the sampler."""
    given = {"is_weight": SimpleNamespace(enabled=weighted)}
    listed = [SimpleNamespace(enabled=each) for each in filters]
    return SimpleNamespace(train_infer_correction=SimpleNamespace(**given, filters=listed))


@pytest.mark.parametrize(
    ("own", "sampled", "config", "taken"),
    [
        pytest.param(OWN, SAMPLED, None, True, id="a bridge's"),
        pytest.param(OWN, SAMPLED, correction(False, False), True, id="a correction that is off"),
        pytest.param(OWN, SAMPLED, correction(True), False, id="ROLL's weights"),
        pytest.param(OWN, SAMPLED, correction(False, False, True), False, id="ROLL's filters"),
        pytest.param(OWN, None, None, False, id="none recorded"),
        pytest.param(None, SAMPLED, None, False, id="not of a bridge"),
    ],
)
def test_the_samplers_log_probabilities_are_the_old_ones(compute, own, sampled, config, taken):
    from shmbridge.consumers.roll.actor_worker import ShmActorWorker

    given, rolls = batch_of(own, sampled), torch.full((2, 4), -9.0)
    given.batch["old_log_probs"] = rolls.clone()
    done = with_precomputed(compute)(data=given, **ARGUMENTS, pipeline_config=config)
    assert torch.equal(done.batch["old_log_probs"], SAMPLED if taken else rolls)
    # ROLL's actor takes `old_log_probs` of a batch without this column, and else those of its first pass
    assert ("sample_uuid" in done.non_tensor_batch) != taken

    worker = ShmActorWorker.__new__(ShmActorWorker)
    worker.pipeline_config = config or SimpleNamespace(enable_old_logprobs_recompute=False, ppo_epochs=1)
    worker.pipeline_config.enable_old_logprobs_recompute, worker.pipeline_config.ppo_epochs = False, 1
    worker._logprobs_cache = {}
    first = torch.full((2, 4), -0.5)
    old = worker.get_old_log_probs_with_cache(batch_of(own, sampled), first)
    assert torch.equal(old, SAMPLED if taken else first)


def test_another_signature_is_refused():
    def compute(data, gamma, discount): ...

    with pytest.raises(shmbridge.BadArgument, match="takes data, gamma, discount"):
        check_signature(compute)


def test_the_pipeline_computes_with_them_only_while_it_runs():
    from roll.pipeline.agentic import agentic_pipeline

    before = agentic_pipeline.agentic_compute_advantage
    with pytest.raises(RuntimeError), installed(agentic_pipeline):
        done = agentic_pipeline.agentic_compute_advantage(data=batch_of(OWN), **ARGUMENTS)
        assert torch.equal(done.batch["advantages"], TRAINED)
        raise RuntimeError
    assert agentic_pipeline.agentic_compute_advantage is before


def test_the_actors_loss_takes_them(monkeypatch):
    from shmbridge.consumers.roll.actor_worker import ActorWorker, ShmActorWorker

    seen = []
    monkeypatch.setattr(ActorWorker, "loss_func", lambda _, data, output: (seen.append(data), {}))
    worker = ShmActorWorker.__new__(ShmActorWorker)
    data = batch_of(OWN)
    data.batch["advantages"] = torch.zeros(2, 4)
    worker.loss_func(data, None)
    assert torch.equal(seen[0].batch["advantages"], TRAINED)
    rolls = batch_of(None)
    rolls.batch["advantages"] = torch.ones(2, 4)
    worker.loss_func(rolls, None)
    assert torch.equal(seen[1].batch["advantages"], torch.ones(2, 4))
