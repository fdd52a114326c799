"""The actor's weights go into the bridge as ROLL gathers them, and the policy version is theirs."""

from types import SimpleNamespace

import pytest
import torch

import shmbridge
from shmbridge.weights import WeightsReader, WeightsWriter
from tests.trainers.roll.conftest import Queue
from tests.trainers.weights_contract import assert_published


def worker_of(env_config, rank=0, strategy="fsdp2_train", lora=None, model=None):
    """Returns a `PublishingActorWorker` that ROLL has not started, and ROLL's updater of its weights."""
    from shmbridge.consumers.roll.actor_worker import PublishingActorWorker

    updater = SimpleNamespace(model=model, _model_update_buffer_size=200, model_update=lambda: {"rolls": 1})
    worker = object.__new__(PublishingActorWorker)
    manager = SimpleNamespace(env_configs={0: {0: {"config": env_config}}, 1: {1: {"config": {}}}})
    worker.rank, worker.pipeline_config = rank, SimpleNamespace(train_env_manager=manager)
    worker.worker_config = SimpleNamespace(
        strategy_args=SimpleNamespace(strategy_name=strategy), model_args=SimpleNamespace(lora_target=lora)
    )
    updaters = {}
    worker.strategy = SimpleNamespace(
        weight_updaters=updaters,
        setup_model_update=lambda infer_cluster, model_update_name: updaters.update(update=updater),
    )
    return worker, updater


def of_actor_worker(model, bridge, rank):
    """ROLL's gathering of FSDP2, where ROLL copies weights to its engines."""
    model.config = SimpleNamespace(model_type="qwen2")
    worker, _ = worker_of({"bridge": bridge}, rank, model=model)
    worker.setup_model_update(infer_cluster=None, model_update_name="update")

    def publish(step: int) -> None:
        assert worker.strategy.weight_updaters["update"].model_update() == {"rolls": 1}

    return publish


@pytest.mark.timeout(300)
def test_two_ranks_publish_what_a_reader_finds_equal(bridge):
    assert_published(of_actor_worker, bridge, "fsdp2")


@pytest.mark.parametrize(("strategy", "lora"), [("megatron_train", None), ("fsdp2_train", "all-linear")])
@pytest.mark.parametrize("weights", [None, True, False])
def test_weights_that_are_not_gathered_are_named(bridge, monkeypatch, strategy, lora, weights):
    from shmbridge.consumers.roll import actor_worker

    worker, rolls = worker_of({"bridge": bridge, "weights": weights}, strategy=strategy, lora=lora)
    said = []
    monkeypatch.setattr(actor_worker.log, "warning", lambda *words: said.append(str(words[-1])))
    words = f"no weights of {strategy} go into {bridge}"
    if weights:
        with pytest.raises(shmbridge.BadArgument, match=f"{words}: .* -> env_config.weights: false"):
            worker.setup_model_update(None, "update")
        return
    worker.setup_model_update(None, "update")
    assert worker.strategy.weight_updaters["update"] is rolls
    assert [words in each for each in said] == ([True] if weights is None else [])


@pytest.mark.parametrize("before", [None, 7])
def test_a_steps_version_is_that_of_the_weights_that_the_actor_wrote_for_it(bridge, make_manager, before):
    """Also every other step, by ROLL's `model_update_frequency`, and on a bridge that was trained before."""
    model = SimpleNamespace(named_parameters=lambda: [("w", torch.nn.Parameter(torch.ones(2)))])
    model.config = SimpleNamespace(model_type="qwen2")
    worker, _ = worker_of({"bridge": bridge}, model=model)
    with shmbridge.Producer(bridge, lane_bytes="64K") as producer, WeightsReader(bridge) as weights:
        if before is not None:
            with shmbridge.Consumer(bridge) as consumer, WeightsWriter(bridge) as writer:
                consumer.publish_policy_version(before)
                writer.publish(before, [("w", torch.zeros(2))])
        worker.setup_model_update(None, "update")
        update = worker.strategy.weight_updaters["update"]
        manager = make_manager(Queue(0), start="from-scratch")
        first = 0 if before is None else before + 1
        for step in range(4):
            if step % 2 == 0:
                update.model_update()
                assert weights.version == first + step
                assert producer.policy_version == (first + step - 1 if step else -1 if before is None else 7)
            reader = manager._reader or manager._join()
            manager.update_step(step)
            assert producer.policy_version == first + step
        reader.leave(orderly=True)
