"""SkyRL's program over a bridge, and its trainers: `BridgeSteps` goes before any trainer of SkyRL.

    python -m skyrl.train.entrypoints.main_base \\
        trainer.override_entrypoint=shmbridge.consumers.skyrl.entrypoint \\
        bridge.name=run1 data.train_data=[] trainer.algorithm.advantage_estimator=shmbridge ...

The Ray task that runs the trainer is the consumer of the bridge. A trainer of your own:
`class MyTrainer(BridgeSteps, RayPPOTrainer)`; it says what became of a group, and keeps the advantages of
every step.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import ray
import transformers
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.io import io
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import initialize_ray, validate_cfg
from skyrl.train.utils.trainer_utils import ResumeMode

import shmbridge
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.feed import STATE, Drained, Feed, save_published, warn_of_stale_rows
from shmbridge.consumers.skyrl.config import (
    NAME,
    ConfigDoesNotFit,
    ShmTrainConfig,
    check,
    compares_with_sampler,
    max_staleness,
    needs_logprobs,
)
from shmbridge.consumers.skyrl.generator import GroupDoesNotFit, NobodyAsks, NotEvaluated, ShmGenerator
from shmbridge.consumers.skyrl.weights import ShmInferenceClient, policy_worker

log = logging.getLogger(__name__)

OVERRIDE = "trainer.override_entrypoint="
# What ends training and is no fault of a program: each says what to change.
TO_CHANGE = (
    shmbridge.ShmBridgeError, ConfigDoesNotFit, Drained, GroupDoesNotFit, NoAdvantages, NobodyAsks,
    NotEvaluated,
)  # fmt: skip


class EmptyPrompts:
    """What SkyRL's data loader needs of a data set: environments have the real prompts, SkyRL draws some.

    Args:
        size: prompts; SkyRL makes `size // train_batch_size` steps an epoch.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"{size} prompts -> at least train_batch_size of them")
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not 0 <= item < self.size:
            raise IndexError(item)
        prompt = [{"role": "user", "content": ""}]
        return {"prompt": prompt, "env_class": None, "env_extras": {}, "uid": str(item)}

    @staticmethod
    def collate_fn(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns SkyRL's prompts, one dictionary each."""
        return items


class ShmExp(BasePPOExp):
    """SkyRL's experiment with a bridge in place of its generator and its engines; a context manager.

    Args:
        cfg: a ShmTrainConfig.
        feed: of the bridge; None: opened here, as the config says, and closed by `close`.

    Raises:
        ConfigDoesNotFit: a setting does not go with a bridge. ConsumerTaken: the bridge has a consumer.
    """

    def __init__(self, cfg: ShmTrainConfig, feed: Feed | None = None) -> None:
        check(cfg)
        self.cfg = cfg
        super().__init__(cfg)
        self._owned = feed is None
        self.feed = feed or self._feed()

    def _feed(self) -> Feed:
        trainer, bridge = self.cfg.trainer, typing.cast(Any, self.cfg.bridge)  # checked words
        local = "" if io.is_cloud_path(trainer.ckpt_path) else trainer.ckpt_path
        if bridge.start == "from-bridge":  # a checkpoint that is loaded replaces these weights
            policy, folder = trainer.policy.model, os.path.join(local or f"runs/{bridge.name}", "from-bridge")
            if save_published(bridge.name, policy.path, folder, self.tokenizer, trust_remote_code=True):
                policy.path = folder
        model = transformers.AutoConfig.from_pretrained(trainer.policy.model.path, trust_remote_code=True)
        model = model.get_text_config()
        limits = bridge.max_token_len, getattr(model, "max_position_embeddings", None)
        return Feed(
            bridge.name,
            groups=trainer.policy_mini_batch_size
            if trainer.fully_async.enabled
            else trainer.train_batch_size,
            exact=True,
            release_at=bridge.release_at,
            max_staleness=max_staleness(self.cfg),
            set_aside_after=bridge.set_aside_after,
            run=self._run(),
            run_dir=local or None,
            unfit=bridge.unfit,
            longest_row=min((limit for limit in limits if limit), default=None),
            vocabulary=getattr(model, "vocab_size", None),
            mask_truncated=self.cfg.generator.apply_overlong_filtering,
            start=bridge.start,
        )

    def _run(self) -> shmbridge.Run:
        trainer, generator = self.cfg.trainer, self.cfg.generator
        steps = max(1, len(self.train_dataset) // trainer.train_batch_size) * trainer.epochs
        return shmbridge.Run(
            batch_size=trainer.train_batch_size * generator.n_samples_per_prompt,
            max_token_len=self.cfg.bridge.max_token_len,
            num_steps=min(steps, trainer.max_training_steps or steps),
            save_checkpoint_interval=max(trainer.ckpt_interval, 0) or -1,
        )

    def get_train_dataset(self) -> Any:
        """Returns SkyRL's data set, or empty prompts if `data.train_data` names no file."""
        if self.cfg.data.train_data:
            return super().get_train_dataset()
        return EmptyPrompts(self.cfg.trainer.train_batch_size * self.cfg.bridge.steps)

    def get_inference_client(self) -> ShmInferenceClient:
        """Returns the client that starts no engine, and publishes policy versions."""
        bridge = self.cfg.bridge
        return ShmInferenceClient(self.feed, bridge.name, self.cfg.trainer.policy.model.path, bridge.engines)

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> ShmGenerator:
        """Returns the generator that reads the bridge."""
        return ShmGenerator(
            self.feed,
            cfg.generator.n_samples_per_prompt,
            step_wise=cfg.generator.step_wise_trajectories,
            long_groups=cfg.bridge.long_groups,
            match=cfg.bridge.match,
            logprobs="all" if needs_logprobs(cfg) else "any",
            timeout_s=cfg.bridge.timeout_s,
        )

    def get_trainer(self, cfg: Any, **parts: Any) -> Any:
        """Returns the trainer of the config, over a bridge."""
        if cfg.trainer.fully_async.simulate_training:
            return ShmTrainerSim(cfg=cfg, **parts)
        if cfg.trainer.fully_async.enabled:
            return ShmAsyncTrainer(cfg=cfg, **parts)
        return ShmTrainer(cfg=cfg, **parts)

    def close(self) -> None:
        """Closes the feed if it was opened here. Releases nothing. Idempotent."""
        self.__exit__(None, None, None)

    def __enter__(self) -> ShmExp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (trainer := getattr(self, "trainer", None)) is not None:
            trainer.generator.close()  # what failed, the trainer has told the feed
        if self._owned:
            self.feed.__exit__(kind, error, trace)


def train(cfg: ShmTrainConfig) -> None:
    """Trains, in the calling process: in a Ray task on the node of the bridge. Blocks."""
    with ShmExp(cfg) as exp:
        exp.run()


def main() -> None:
    """Parses the command line, starts Ray, and trains. Blocks until training ends.

    Ends with one sentence and exit code 1 for what the user can change; other errors are raised.
    """
    words = [arg for arg in sys.argv[1:] if not arg.startswith(OVERRIDE)]
    try:
        cfg = ShmTrainConfig.from_cli_overrides(words)
        check(cfg)
    except ValueError as wrong:
        sys.exit(f"error: {wrong}")
    validate_cfg(cfg)
    initialize_ray(cfg)
    try:
        ray.get(ray.remote(num_cpus=1, max_retries=0)(train).remote(cfg))
    except ray.exceptions.RayTaskError as failed:
        if isinstance(failed.cause, TO_CHANGE):
            sys.exit(f"error: {failed.cause}")
        raise


if __name__ == "__main__":
    main()


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
