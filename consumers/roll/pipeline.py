"""`ShmAgenticPipeline`: ROLL's agentic pipeline, whose advantages are those of the bridge.

    pipeline_cls: shmbridge.consumers.roll.pipeline.ShmAgenticPipeline

ROLL's `examples/start_agentic_pipeline.py` reads that key. Use it, rather than `ShmActorWorker`, for the
bridge's advantages in ROLL's metrics, and for its whitening, clipping and distillation on them. It wraps one
function of ROLL while `run` runs: see `with_precomputed`.

Its actor writes weights into the bridge (`PublishingActorWorker`), unless you name another `worker_cls`. It
tells the environments which groups a step trained, at which it failed, and which a checkpoint contains, by
their own `update_step`. What the model contains is saved with the pipeline's state, as its `kv`.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import ray
from roll.pipeline.agentic import agentic_pipeline
from roll.utils.constants import RAY_NAMESPACE

from shmbridge import BadArgument
from shmbridge.consumers.feed import (
    HeldRecords,
    bridge_info,
    refuse,
    require_start,
    setting,
    trained_as,
    warn_if_untested,
)
from shmbridge.consumers.roll.actor_worker import NAME, check_signature, installed
from shmbridge.consumers.roll.env_manager import (
    GROUP,
    REFUSED,
    REFUSED_BY_PIPELINE,
    WORD,
    env_configs_of,
    workers_of,
)

OWN_WORKER = "roll.pipeline.agentic.agentic_actor_worker.ActorWorker"  # ROLL's, if none is named
PUBLISHING_WORKER = "shmbridge.consumers.roll.actor_worker.PublishingActorWorker"

log = logging.getLogger(__name__)


class ShmAgenticPipeline(agentic_pipeline.AgenticPipeline):
    """ROLL's pipeline for batches that may have a column `shm_advantages`.

    Args:
        pipeline_config: ROLL's `AgenticConfig`.

    Raises:
        BadArgument: ROLL computes advantages in another way than the tested one, or a setting is refused;
            nothing was started.
    """

    def __init__(self, pipeline_config: Any) -> None:
        warn_if_untested("roll", "0.3", "0.4")
        check_signature(getattr(agentic_pipeline, NAME))
        refuse((*REFUSED, *REFUSED_BY_PIPELINE), pipeline_config, BadArgument)
        if setting(pipeline_config, "actor_train.worker_cls") == OWN_WORKER:
            pipeline_config.actor_train.worker_cls = PUBLISHING_WORKER
        super().__init__(pipeline_config)
        self._batch: list[str] = []  # names of the groups in training
        self._trained: list[str] = []  # of those that no durable checkpoint contains
        self._loaded: dict[str, dict[str, Any]] = self.state.kv.get(WORD, {})  # by bridge
        self._saved: list[str] = []  # of those in the newest checkpoint, whose states are `state.kv[WORD]`

    def run(self) -> None:
        """Trains. Blocks until the last step. A failure counts against the groups of its step.

        Raises BridgeAhead: a bridge was trained before by another run than the loaded checkpoint's; its
        weights are as they were.
        """
        for bridge, given in env_configs_of(self.pipeline_config.train_env_manager).items():
            run_id = self._loaded.get(bridge, {}).get("run_id")
            require_start(bridge, trained_as(bridge_info(bridge)), given.get("start"), run_id)
        self._tell(states=self._loaded)
        try:
            with installed(agentic_pipeline):
                super().run()
        except Exception as error:
            if self._batch:
                try:
                    self._tell(groups=self._batch, failed=f"{type(error).__name__}: {error}"[:2000])
                except Exception as wrong:
                    log.warning("the failure is not counted against the groups of its step: %s", wrong)
            raise

    def adjust_batch(self, data: Any, mode: str = "copy") -> Any:
        """As ROLL's, which calls it with the batch of a step. Never blocks."""
        self._batch = sorted(set(data.non_tensor_batch.get(GROUP, ())))
        return super().adjust_batch(data, mode)

    def do_checkpoint(self, global_step: int, is_last_step: bool | None = None) -> None:
        """As ROLL's, which calls it after each step. Blocks as that."""
        config, names, self._batch = self.pipeline_config, self._batch, []
        self._tell(groups=names)
        self._trained += names
        last = global_step == config.max_steps - 1
        if global_step == 0 or not (last or global_step % config.save_steps == 0):  # ROLL saves nothing
            super().do_checkpoint(global_step, is_last_step)
            return
        before = self.state.kv.get(WORD, {}), self._saved
        states, self._saved = self._states(), list(self._trained)
        self.state.kv[WORD] = states
        super().do_checkpoint(global_step, is_last_step)
        # FSDP2 writes in the background: then only the checkpoint before is known to be durable
        strategy = config.actor_train.strategy_args
        waits = last or not strategy.strategy_config.get("async_save_ckpt", "fsdp2" in strategy.strategy_name)
        durable, contained = (states, self._saved) if waits else before
        self._tell(saved=durable)
        over = set(contained)
        self._trained = [name for name in self._trained if name not in over]

    def _states(self) -> dict[str, dict[str, Any]]:
        """Returns the feed's state of each bridge: what the model contains, and may come again."""
        states = dict(self.state.kv.get(WORD, {}))
        held = {bridge: HeldRecords({}, {}) for bridge in states} | {
            bridge: HeldRecords(state["held"], state["mounts"]).that_may_come_again()
            for bridge, state in self._loaded.items()
        }
        for name in self._trained:
            state = json.loads(name)
            bridge = state.pop("bridge")
            states[bridge] = state
            mine = held.setdefault(bridge, HeldRecords({}, {}))
            mine |= HeldRecords(state["held"], state["mounts"])
        return {bridge: state | held[bridge].state() for bridge, state in states.items()}

    def _tell(self, **word: Any) -> None:
        """Tells the environment workers, by the call with which ROLL begins a step. Blocks for them."""
        manager = self.pipeline_config.train_env_manager
        workers = [
            ray.get_actor(f"{manager.name}-{rank}", namespace=RAY_NAMESPACE) for rank in workers_of(manager)
        ]
        ray.get([worker.update_step.remote(self.state.step, {WORD: word}) for worker in workers])
