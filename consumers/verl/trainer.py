"""verl's trainer mode `shmbridge`: no inference engine of its own, weights out through the bridge.

    trainer.v1.trainer_mode: shmbridge

A step is verl's own. What this mode adds: the weights go out when training begins and after each step, the
`atropos/...` metrics are logged, and the feed hears which groups a step trained, at which it failed, and
which a durable checkpoint contains. verl samples with its asynchronous replay buffer, so
`trainer.v1.sampler.max_off_policy_threshold` drops stale groups or waits.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer

import shmbridge
from shmbridge.consumers.feed import save_published, warn_of_stale_rows
from shmbridge.consumers.verl.settings import (
    MODE,
    VALIDATES,
    VERSION,
    Settings,
    compares_with_sampler,
    form_of,
    release_at,
    steps_until_taken,
)

log = logging.getLogger(__name__)

MANAGER = "shmbridge.consumers.verl.agent_loop_manager.ShmAgentLoopManager"


@register_trainer(MODE)
class BridgePPOTrainer(PPOTrainer):
    """verl's PPO trainer with a `ShmAgentLoopManager`. As verl's trainers, for one thread.

    Args:
        config: verl's whole configuration.

    Raises:
        ValueError: a setting does not go with a bridge; names the key. Before verl starts its actors, which
            may take minutes.
    """

    _enable_hybrid_replicas = False  # verl's word: no engines on the training GPUs

    def __init__(self, config: Any) -> None:
        _check(config)
        _warn_if_taken(config.trainer.atropos.bridge)
        if config.trainer.atropos.get("start", None) == "from-bridge":
            _take_weights(config)
        super().__init__(config)
        self._trained: list[str] = []
        self._metrics: dict[str, float] = {}  # of the step, if its groups are trained before it is saved
        self._states: dict[str, Any] = {}  # of checkpoints that are not durable yet, by folder
        self._resumed: str | None = None
        self._warns = not compares_with_sampler(config)

    def _load_checkpoint(self) -> None:
        """Loads verl's checkpoint, but not its copy of TransferQueue: the bridge has those groups."""
        super()._load_checkpoint()
        restored = list((tq.kv_list("train") or {}).get("train", {}))
        if restored:
            tq.kv_clear(keys=restored, partition_id="train")
        self._restored_tq_prompt_count = 0
        if self.global_steps:
            named = self.config.trainer.resume_mode == "resume_path"
            self._resumed = self.config.trainer.resume_from_path if named else self._folder()

    def _folder(self) -> str:
        """Returns the folder of this step's checkpoint."""
        return os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")

    def _save_checkpoint(self) -> None:
        """Saves verl's checkpoint, and before it what tells which groups are in it: a kill between the two
        leaves verl with the checkpoint before.
        """
        manager, folder = self.agent_loop_manager, self._folder()
        if manager.feed.release_at == "checkpoint":
            self._metrics = manager.step_ended(self._trained)
        os.makedirs(folder, exist_ok=True)
        self._states[folder] = manager.feed.save_state(folder)
        super()._save_checkpoint()
        self._release_saved()

    def _release_saved(self) -> None:
        """Releases what the newest durable checkpoint contains. verl names that one in a file: at once, or
        once all its ranks have written it (`async_save`).
        """
        if not self._states:
            return
        newest = find_latest_ckpt_path(self.config.trainer.default_local_dir)
        if (state := self._states.pop(newest, None)) is not None:
            self.agent_loop_manager.feed.checkpointed(state)

    def on_train_begin(self) -> None:
        """Sends the weights that training begins with, and asks for the batches to gather ahead.

        Raises BridgeAhead: the bridge was trained before, and verl has loaded no checkpoint of its run.
        """
        feed = self.agent_loop_manager.feed
        if self._resumed is not None:
            feed.load_state(self._resumed)
        feed.require_start()
        sent = self._send_weights(self.global_steps - 1)
        feed.begin_run(max(sent[VERSION], feed.consumer.policy_version))
        ahead = self.config.trainer.v1.get(MODE, {}).get("num_warmup_batches", 0)
        self._add_async_warmup_batches(ahead)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Trains one step of verl's, and notes its rows, or its groups if it fails."""
        try:
            batch = super().step(metrics, timing_raw)
        except BaseException as error:
            self.agent_loop_manager.step_failed(error)
            raise
        self._trained = list(batch.keys)
        weights, rows = self.global_steps - 1, [tag for tag in batch.tags if not tag.get("is_padding")]
        late = sum(tag.get("min_global_steps", weights) < weights for tag in rows)
        if late and self._warns:
            self._warns = False
            how = "algorithm.rollout_correction.bypass_mode=True"
            warn_of_stale_rows(self.config.trainer.atropos.bridge, late, how)
        return batch

    def on_sample_end(self) -> None:
        """Does nothing: there is no engine that would free its memory."""

    def on_step_end(self) -> None:
        """Sends the step's weights; its groups are trained now. verl has saved its checkpoint by now."""
        with marked_timer("update_weights", self.timing_raw, color="red"):
            sent = self._send_weights(self.global_steps)
        ended = self.agent_loop_manager.step_ended(self._trained, sent.get(VERSION))
        self._release_saved()
        self._pending_sync_metrics, self._metrics = {**self._metrics, **sent, **ended}, {}

    def _send_weights(self, step: int) -> dict[str, Any]:
        """Returns what the writing actor reports.

        verl's CheckpointEngineManager is not used: it fails where there are no engines.
        """
        of_ranks = ray.get(self.actor_rollout_wg.update_weights(global_steps=step, mode=MODE))
        return {name: value for each in of_ranks for name, value in (each or {}).items()}


def _check(config: Any) -> None:
    settings, rollout = Settings.of(config), config.actor_rollout_ref.rollout
    form_of(config)
    release_at(config, settings)
    steps_until_taken(config, settings)
    engine = rollout.checkpoint_engine
    if engine.backend != "shmbridge":
        raise ValueError(
            f"trainer mode {MODE} sends weights through the bridge, and checkpoint_engine.backend is "
            f"{engine.backend!r} -> actor_rollout_ref.rollout.checkpoint_engine.backend=shmbridge"
        )
    named = (engine.engine_kwargs.get("shmbridge", None) or {}).get("bridge", None)
    if named != settings.bridge:
        raise ValueError(
            f"weights would go to bridge {named!r}, and groups come from {settings.bridge!r}, whose "
            "environments would never get them -> "
            f"++actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.shmbridge.bridge={settings.bridge}"
        )
    if not (rollout.get("agent", None) or {}).get("agent_loop_manager_class", None):
        raise ValueError(
            f"trainer mode {MODE} has no engines, and verl's own agent loops would ask them -> "
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}"
        )
    if config.trainer.get("val_before_train", True) or config.trainer.test_freq > 0:
        raise ValueError(VALIDATES)


def _take_weights(config: Any) -> None:
    """Makes a trained bridge's weights the model that verl loads, also in runs that resume this one."""
    bridge, folder = (
        config.trainer.atropos.bridge,
        os.path.join(config.trainer.default_local_dir, "from_bridge"),
    )
    resumes = config.trainer.resume_mode == "resume_path" or (
        config.trainer.resume_mode == "auto" and find_latest_ckpt_path(config.trainer.default_local_dir)
    )
    if not resumes:
        given = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        source, remote = given.local_path, given.trust_remote_code
        if not save_published(bridge, source, folder, given.tokenizer, trust_remote_code=remote):
            return
    if os.path.isdir(folder):
        config.actor_rollout_ref.model.path = folder


def _warn_if_taken(name: str) -> None:
    """Says early what would end the run once verl's actors are up; it may change until then."""
    taken = [each.consumer_pid for each in shmbridge.list_bridges() if each.name == name]
    if taken and taken[0] is not None:
        log.warning(
            "bridge %r has a living consumer, pid %d: this trainer will end once its actors are up, unless "
            "that one ends before -> end it, or trainer.atropos.bridge=%s2",
            name,
            taken[0],
            name,
        )
