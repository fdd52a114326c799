"""Plugin, estimator, prompts and checkpoint engine, one by one, and the recipe's context manager."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.consumers.verl.agent_loop_manager import PlaceholderPrompts
from shmbridge.consumers.verl.settings import VERSION, passed_through
from shmbridge.consumers.verl.weights import ShmCheckpointEngine
from shmbridge.weights import WeightsReader, WeightsWriter


def tensors(value: float) -> dict[str, torch.Tensor]:
    value = float(value)
    return {"a": torch.full((3, 5), value), "b": torch.full((7,), value, dtype=torch.bfloat16)}


def test_importing_verl_registers_everything_through_the_entry_point():
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from shmbridge.consumers.verl.trainer import BridgePPOTrainer

    assert get_adv_estimator_fn("shmbridge") is get_adv_estimator_fn("grpo_atropos") is passed_through
    assert CheckpointEngineRegistry.get("shmbridge") is ShmCheckpointEngine
    assert get_trainer_cls("shmbridge") is BridgePPOTrainer
    with pytest.raises(ValueError, match="trainer_mode=shmbridge"):
        RolloutReplicaRegistry.get("shmbridge")()


ORDERS = """
import importlib, importlib.metadata, os, sys, traceback
import ray, tensordict, torch, transfer_queue, transformers  # once, for all orders

failed = []
for first in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            if first == "entry point":
                importlib.metadata.entry_points(group="verl.plugins")["shmbridge"].load()
            else:
                importlib.import_module(first)
            from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
            from verl.checkpoint_engine import CheckpointEngineRegistry
            from verl.trainer.ppo.core_algos import get_adv_estimator_fn
            from verl.trainer.ppo.v1 import get_trainer_cls

            for registered in (get_trainer_cls, get_adv_estimator_fn, CheckpointEngineRegistry.get):
                registered("shmbridge")
            assert StorageBootstrapProvider.get_provider("shmbridge")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(first)
sys.exit(f"not registered if imported first: {failed}" if failed else 0)
"""


@pytest.mark.timeout(400)  # it imports verl once for each order
def test_it_does_not_matter_what_is_imported_first():
    room = "shmbridge.consumers.verl"
    modules = [f"{room}.{each.name}" for each in pkgutil.iter_modules(importlib.import_module(room).__path__)]
    firsts = [
        "entry point",
        "verl",
        "verl.trainer.main_ppo",
        "shmbridge.consumers.transfer_queue.backend",
        room,
        *modules,
    ]
    assert f"{room}.settings" in modules
    ended = subprocess.run([sys.executable, "-c", ORDERS, *firsts], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_importing_shmbridge_and_its_other_rooms_imports_no_verl():
    code = (
        "import sys, shmbridge, shmbridge.consumers.trajectories, shmbridge.consumers.dataset;"
        "assert not {'verl', 'ray', 'transfer_queue', 'tensordict'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_verls_words_that_the_adapter_builds_on_are_there():
    """One line for each thing of verl that is not a registry."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.workers.engine_workers import ActorRolloutRefWorker

    source = inspect.getsource(PPOTrainer)
    assert 'getattr(self, "_enable_hybrid_replicas", True)' in source
    assert "metrics.update(self._consume_sync_metrics())" in source
    fit = inspect.getsource(PPOTrainer.fit)
    assert fit.index("self._save_checkpoint()") < fit.index("self.on_step_end()") < fit.index("tq.kv_clear(")
    assert list(inspect.signature(ActorRolloutRefWorker.update_weights).parameters)[1:] == [
        "global_steps",
        "mode",
    ]
    assert 'key.split("_")[0]' in inspect.getsource(ReplayBufferAsync._materialize_batch)
    assert "_restored_tq_prompt_count" in source


def test_the_estimator_returns_the_rewards_where_tokens_are_trained():
    rewards, mask = torch.tensor([[0.5, -1.0, 2.0]]), torch.tensor([[1, 0, 1]])
    advantages, returns = passed_through(rewards, mask, config={"use_kl_in_reward": False}, index=None)
    assert advantages.tolist() == returns.tolist() == [[0.5, 0.0, 2.0]]
    with pytest.raises(ValueError, match="use_kl_loss"):
        passed_through(rewards, mask, config={"use_kl_in_reward": True})


def test_verls_gpg_is_the_recipes_advantage_weighted_loss():
    import types

    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from shmbridge.consumers.losses.sft import compute_advantage_weighted_sft_loss

    random = torch.Generator().manual_seed(3)
    logits, tokens = torch.randn(4, 9, 12, generator=random), torch.randint(12, (4, 9), generator=random)
    advantages, mask = torch.randn(4, 9, generator=random), torch.rand(4, 9, generator=random) > 0.4
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    config = types.SimpleNamespace(global_batch_info={})
    ours = compute_advantage_weighted_sft_loss(tokens, advantages, mask, logits, normalization="none")
    theirs, _ = get_policy_loss_fn("gpg")(
        old_log_prob=logprobs, log_prob=logprobs, advantages=advantages[:, 1:],
        response_mask=mask[:, 1:].float(), loss_agg_mode="token-mean", config=config,
    )  # fmt: skip
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)


def test_placeholders_are_as_many_as_the_configuration_says():
    assert len(PlaceholderPrompts(100)) == len(PlaceholderPrompts("100")) == 100
    assert len(PlaceholderPrompts(100, max_samples=7)) == 7
    with pytest.raises(ValueError, match="number of placeholders"):
        PlaceholderPrompts("~/data/gsm8k/train.parquet")


async def received(engine: ShmCheckpointEngine) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in engine.receive_weights(global_steps=0)}


def engines(bridge: str) -> tuple[ShmCheckpointEngine, ShmCheckpointEngine]:
    return (
        ShmCheckpointEngine(bucket_size=1 << 20, is_master=True, bridge=bridge, timeout_s=20.0),
        ShmCheckpointEngine(bucket_size=1 << 20, bridge=bridge, timeout_s=20.0),
    )


async def test_weights_pass_from_the_actor_to_an_engine_of_verls(bridge):
    actor, rollout = engines(bridge)
    for step in range(3):
        rollout.prepare()
        sent = await actor.send_weights(iter(tensors(step).items()), global_steps=step)
        assert sent[VERSION] == step
        got = await received(rollout)
        assert {name: tensor.dtype for name, tensor in got.items()} == {
            "a": torch.float32,
            "b": torch.bfloat16,
        }
        assert all(torch.equal(got[name], wanted) for name, wanted in tensors(step).items())


async def test_an_engine_waits_for_the_next_version_not_for_the_last(bridge):
    actor, rollout = engines(bridge)
    await actor.send_weights(iter(tensors(1.0).items()), global_steps=1)
    rollout.prepare()
    waiting = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(received(rollout)))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done, "it has read the version that was there before"
    await actor.send_weights(iter(tensors(2.0).items()), global_steps=2)
    assert (await waiting)["a"][0, 0] == 2.0


async def test_other_ranks_gather_and_write_nothing(bridge):
    asked = []

    def gathered() -> Any:
        for name, tensor in tensors(0.0).items():
            asked.append(name)
            yield name, tensor

    other = ShmCheckpointEngine(bucket_size=1, is_master=False, bridge=bridge)
    assert await other.send_weights(gathered(), global_steps=0) == {}
    assert asked == ["a", "b"]
    assert other.prepare() == {}
    assert other._reading().version is None


async def test_a_restart_from_an_older_checkpoint_goes_on_above_the_versions(bridge, producer):
    with WeightsWriter(bridge) as before:
        before.publish(8, tensors(8.0).items())
    actor, _ = engines(bridge)
    versions = [
        (await actor.send_weights(iter(tensors(step).items()), global_steps=step))[VERSION]
        for step in (5, 6, 6, 7)
    ]
    assert versions == [9, 10, 11, 12]


def test_the_engine_asks_for_its_bridge():
    with pytest.raises(ValueError, match=r"engine_kwargs\.shmbridge\.bridge=run1"):
        ShmCheckpointEngine(bucket_size=1)


def test_the_recipes_context_manager_loads_on_entry_and_frees_on_exit(bridge):
    from shmbridge.consumers.engines.engine import Engine
    from shmbridge.consumers.verl.weights import AtroposShardingManager

    class Recorded(Engine):
        address, in_process = "here", True

        def __init__(self) -> None:
            self.calls: list[str] = []
            self.loaded: dict[str, np.ndarray] = {}

        def require_callable(self) -> None:
            pass

        def version(self) -> int | None:
            return None

        def update(self, update: Any) -> None:
            self.calls.append(f"update {update.version}")
            with WeightsReader(update.bridge) as reader:
                _, self.loaded = reader.copy()

        def wake(self) -> None:
            self.calls.append("wake")

        def sleep(self, pause: Any) -> None:
            self.calls.append("sleep")

        def close(self) -> None:
            self.calls.append("close")

    model, engine = torch.nn.Linear(2, 3), Recorded()
    manager = AtroposShardingManager(bridge, model, engine)
    for value in (1.0, 2.0):
        torch.nn.init.constant_(model.weight, value)
        with manager as entered:
            assert entered.inference_engine is engine
            assert engine.loaded["weight"].tolist() == [[value] * 2] * 3
            assert engine.calls[-1].startswith("update")
        assert engine.calls[-1] == "sleep"
    with pytest.raises(KeyError), manager:
        raise KeyError
    assert engine.calls[-1] == "sleep"
    manager.close()
    assert engine.calls == [
        "wake",
        "update 0",
        "sleep",
        "wake",
        "update 1",
        "sleep",
        "wake",
        "update 2",
        "sleep",
        "close",
    ]
    assert bridge not in [each.name for each in shmbridge.list_bridges()]


KEYS = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.val_before_train=True"], "val_before_train=False"),
        (["trainer.test_freq=5"], "test_freq=-1"),
        ([f"{KEYS}.agent.agent_loop_manager_class=null"], "manager_class=shmbridge.*ShmAgentLoopManager"),
        ([f"{KEYS}.checkpoint_engine.backend=naive"], "checkpoint_engine.backend=shmbridge"),
        ([f"{KEYS}.checkpoint_engine.engine_kwargs.shmbridge.bridge=run2"], "'run2'.*'run1'.*bridge=run1"),
        (["trainer.atropos.bridge=a/b"], "a/b"),
        (["+trainer.atropos.brige=run1"], "trainer.atropos.brige is no key"),
        (["trainer.atropos.max_wait_time=10min"], "max_wait_time='10min' is no number"),
        (["trainer.v1.shmbridge.num_warmup_batches=2"], "max_off_policy_steps=1.*num_warmup_batches=1, or"),
        (["algorithm.use_kl_in_reward=True"], "use_kl_loss"),
        (["+trainer.atropos.release_at=checkpoint"], "save_freq=-1: no checkpoint would .*save_freq=20"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_with_a_bridge_are_refused_before_verl_starts_anything(overrides, words):
    from verl_loop import configured

    from shmbridge.consumers.verl.trainer import BridgePPOTrainer

    with pytest.raises(ValueError, match=words):
        BridgePPOTrainer(configured("run1", "no model", 3, overrides))


def test_a_trained_bridges_weights_become_verls_model(bridge, consumer, tiny, tmp_path):
    from safetensors.numpy import load_file
    from verl_loop import configured

    from shmbridge.consumers.verl import trainer

    class Started(Exception):
        pass

    class Stopped(trainer.BridgePPOTrainer):
        def _build_replay_buffer(self):
            raise Started

    def started() -> str:
        options = [f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=auto"]
        config = configured(bridge, str(tiny), 3, [*options, "+trainer.atropos.start=from-bridge"])
        with pytest.raises(Started):
            Stopped(config)
        return config.actor_rollout_ref.model.path

    wanted = {name: value + 1 for name, value in load_file(tiny / "model.safetensors").items()}
    assert started() == str(tiny), "nothing was trained"
    with WeightsWriter(bridge) as writer:
        writer.publish(3, wanted.items())
        assert started() == str(tmp_path / "from_bridge")
        writer.publish(4, ((name, value + 1) for name, value in wanted.items()))
        (tmp_path / "global_step_1").mkdir()
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
        assert started() == str(tmp_path / "from_bridge"), "verl resumes"
    found = load_file(tmp_path / "from_bridge/model.safetensors")
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert (tmp_path / "from_bridge/tokenizer_config.json").exists()


def test_an_untested_release_is_named_before_its_imports_can_fail(monkeypatch, caplog):
    from shmbridge.consumers.verl import plugin

    monkeypatch.setattr("shmbridge.consumers.feed.settings.version", lambda package: "0.8.0")
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.replica", None)
    with pytest.raises(ImportError):
        plugin.register()
    assert "verl 0.8.0 is outside the releases this adapter was tested with" in caplog.text


def test_a_second_trainer_on_a_bridge_is_warned_before_verl_starts_anything(bridge, consumer, caplog):
    from verl_loop import configured

    from shmbridge.consumers.verl import trainer

    class Started(Exception):
        pass

    class Stopped(trainer.BridgePPOTrainer):
        def _build_replay_buffer(self):
            raise Started

    for name, warned in ((bridge, True), (bridge[:40] + "-other", False)):
        caplog.clear()
        with pytest.raises(Started):
            Stopped(configured(name, "no model", 3, []))
        assert (f"living consumer, pid {os.getpid()}" in caplog.text) == warned
