"""SkyRL's trainers over a bridge: they say what became of a group, and keep the advantages of every step.

`BridgeSteps` goes before any trainer of SkyRL: `class MyTrainer(BridgeSteps, RayPPOTrainer)`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.io import io
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import ResumeMode

from shmbridge.consumers.feed import STATE
from shmbridge.consumers.skyrl.config import compares_with_sampler
from shmbridge.consumers.skyrl.estimator import NAME
from shmbridge.consumers.skyrl.generator import ShmGenerator
from shmbridge.consumers.skyrl.inference_client import ShmInferenceClient
from shmbridge.consumers.skyrl.weights import policy_worker
from shmbridge.consumers.trainer_settings import warn_of_stale_rows

log = logging.getLogger(__name__)


class BridgeSteps:
    """A trainer's calls that a bridge needs to hear of; `generator` is a ShmGenerator.

    An error of a stage between the rows' tensors and the last optimizer step is a failure of the step: the
    next run gets its groups again, until the one at fault is found and set aside, see `Feed.failed`.
    """

    cfg: Any
    generator: ShmGenerator
    inference_engine_client: Any
    dispatch: Any
    has_critic: bool
    global_step: int
    resume_mode: Any
    all_metrics: dict[str, Any]
    _in_training: tuple[str, ...] = ()
    _warned = False  # of stale rows that are trained as if fresh

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        """Builds SkyRL's models; the policy's worker writes its weights into the bridge. Blocks."""
        if isinstance(self.inference_engine_client, ShmInferenceClient):
            PolicyWorker = policy_worker(self.cfg.trainer.strategy)
        super().build_models(PolicyWorker, CriticWorker, RefWorker)  # type: ignore[misc]

    # -- how it starts

    def init_weight_sync_state(self) -> None:
        """Prepares SkyRL's way of weights. Raises BridgeAhead if no checkpoint is to be loaded."""
        if self.resume_mode == ResumeMode.NONE:
            self.generator.feed.require_start()
        super().init_weight_sync_state()  # type: ignore[misc]

    def load_checkpoints(self) -> Any:
        """Loads SkyRL's checkpoint, and which groups it contains. Blocks for the disk.

        Raises BridgeAhead: the bridge was trained before, and this checkpoint is of another run.
        """
        loaded = super().load_checkpoints()  # type: ignore[misc]
        feed, folder = self.generator.feed, loaded[1]
        if folder is not None:
            with tempfile.TemporaryDirectory() as local:
                if io.is_cloud_path(folder) and io.exists(os.path.join(folder, STATE)):
                    io.download_file(os.path.join(folder, STATE), os.path.join(local, STATE))
                if not feed.load_state(local if io.is_cloud_path(folder) else folder):
                    log.warning("%s was saved without a bridge: its groups may come again", folder)
        feed.require_start()
        return loaded

    def save_checkpoints(self) -> Any:
        """Saves SkyRL's checkpoint with the names of the groups in it, then releases these. Blocks.

        The names come first: SkyRL's `latest_ckpt_global_step.txt` never points at a folder without them. A
        checkpoint that SkyRL writes in the background is waited for.
        """
        with io.local_work_dir(
            os.path.join(self.cfg.trainer.ckpt_path, f"global_step_{self.global_step}")
        ) as f:
            self.generator.feed.save_state(f)
        folder = super().save_checkpoints()  # type: ignore[misc]
        if hasattr(self.dispatch, "finalize_pending_saves"):  # SkyRL 0.4
            for model in ("policy", "critic")[: 1 + self.has_critic]:
                self.dispatch.finalize_pending_saves(model)
        self.generator.feed.checkpointed()
        return folder

    # -- steps

    @contextmanager
    def _of_a_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.generator.failed(self._in_training, error)
            raise

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> Any:
        """Makes SkyRL's tensors, and notes which prompts they are of. Never blocks."""
        self._in_training = tuple(dict.fromkeys(uids))
        with self._of_a_step():
            return super().convert_to_training_input(generator_output, uids)  # type: ignore[misc]

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> Any:
        """Returns SkyRL's batch with log-probabilities and values. Blocks for the forward passes."""
        with self._of_a_step():
            return super().fwd_logprobs_values_reward(training_input)  # type: ignore[misc]

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Returns the batch with advantages and returns. Never blocks.

        Of an episode over several rows SkyRL keeps the last row's values, and gives them to all rows. Here
        each row keeps its own.
        """
        own = data["rewards"] * data["response_mask"]
        with self._of_a_step():
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
        """Takes SkyRL's optimizer steps, then ends the step of the batch's groups. Blocks for the steps."""
        self._note_staleness()
        with self._of_a_step():
            status = super().train_critic_and_policy(data)  # type: ignore[misc]
        self.generator.trained(self._in_training)
        if (every := self.cfg.trainer.ckpt_interval) > 0 and self.global_step % every == 0:
            self.generator.feed.state_dict()  # the checkpoint is due: full lanes wait for it from now on
        return status

    def _note_staleness(self) -> None:
        found = self.generator.staleness(self._in_training)
        self.all_metrics.update(found)
        stale = int(found.get("shmbridge/rows_stale", 0))
        if stale and not self._warned and not compares_with_sampler(self.cfg):
            self._warned = True
            how = "trainer.algorithm.policy_loss_type=rollout_is"
            warn_of_stale_rows(self.generator.feed.consumer.bridge, stale, how)


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
