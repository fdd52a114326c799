"""SkyRL's trainers over a bridge: they say when a group is trained, and keep the advantages of every step.

`BridgeSteps` goes before any trainer of SkyRL: `class MyTrainer(BridgeSteps, RayPPOTrainer)`.
"""

from __future__ import annotations

from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer

from shmbridge.consumers.skyrl.config import compares_with_sampler
from shmbridge.consumers.skyrl.estimator import NAME
from shmbridge.consumers.skyrl.generator import ShmGenerator
from shmbridge.consumers.skyrl.inference_client import ShmInferenceClient
from shmbridge.consumers.skyrl.weights import policy_worker
from shmbridge.consumers.trainer_settings import warn_of_stale_rows


class BridgeSteps:
    """A trainer's four calls that a bridge needs to hear of; `generator` is a ShmGenerator."""

    cfg: Any
    generator: ShmGenerator
    inference_engine_client: Any
    all_metrics: dict[str, Any]
    _in_training: frozenset[str] = frozenset()
    _warned = False  # of stale rows that are trained as if fresh

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        """Builds SkyRL's models; the policy's worker writes its weights into the bridge. Blocks."""
        if isinstance(self.inference_engine_client, ShmInferenceClient):
            PolicyWorker = policy_worker(self.cfg.trainer.strategy)
        super().build_models(PolicyWorker, CriticWorker, RefWorker)  # type: ignore[misc]

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> Any:
        """Makes SkyRL's tensors, and notes which prompts they are of. Never blocks."""
        made = super().convert_to_training_input(generator_output, uids)  # type: ignore[misc]
        self._in_training = frozenset(uids)
        return made

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Returns the batch with advantages and returns. Never blocks.

        Of an episode over several rows SkyRL keeps the last row's values, and gives them to all rows. Here
        each row keeps its own.
        """
        own = data["rewards"] * data["response_mask"]
        data = super().compute_advantages_and_returns(data)  # type: ignore[misc]
        algorithm, generator = self.cfg.trainer.algorithm, self.cfg.generator
        if generator.step_wise_trajectories and algorithm.advantage_estimator == NAME:
            data["advantages"], data["returns"] = own, own.clone()
            rows = len(own) - data.metadata.get("pad_size", 0)
            values = own[:rows][data["response_mask"][:rows].bool()]
            self.all_metrics["loss/avg_raw_advantages"] = values.mean().item()
            self.all_metrics["loss/avg_raw_advantages_abs"] = values.abs().mean().item()
        return data

    def train_critic_and_policy(self, data: TrainingInputBatch) -> Any:
        """Takes SkyRL's optimizer steps, then releases the groups of the batch. Blocks for the steps."""
        self._note_staleness()
        status = super().train_critic_and_policy(data)  # type: ignore[misc]
        self.generator.trained(self._in_training)
        return status

    def _note_staleness(self) -> None:
        found = self.generator.staleness(self._in_training)
        self.all_metrics.update(found)
        stale = int(found.get("shmbridge/rows_stale", 0))
        if stale and not self._warned and not compares_with_sampler(self.cfg):
            self._warned = True
            how = "trainer.algorithm.policy_loss_type=rollout_is"
            warn_of_stale_rows(self.generator.consumer.bridge, stale, how)


class ShmTrainer(BridgeSteps, RayPPOTrainer):
    """SkyRL's synchronous trainer over a bridge."""


class ShmAsyncTrainer(BridgeSteps, FullyAsyncRayPPOTrainer):
    """SkyRL's fully asynchronous trainer over a bridge."""


class ShmTrainerSim(BridgeSteps, FullyAsyncTrainerSim):
    """SkyRL's simulation of it: no model, its steps are pauses. They count as training here."""

    def init_weight_sync_state(self) -> None:
        """Makes SkyRL's stub of a dispatch, with two methods that 0.4.0's loop calls and its stub lacks."""
        super().init_weight_sync_state()
        self.dispatch.get_timing_metrics, self.dispatch.finalize_pending_saves = dict, lambda model: None

    async def _run_training(self, training_input: TrainingInputBatch) -> Any:
        self._note_staleness()
        status = await super()._run_training(training_input)
        self.generator.trained(self._in_training)
        return status
