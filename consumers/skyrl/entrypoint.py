"""SkyRL's program over a bridge.

    python -m skyrl.train.entrypoints.main_base \\
        trainer.override_entrypoint=shmbridge.consumers.skyrl.entrypoint \\
        bridge.name=run1 data.train_data=[] trainer.algorithm.advantage_estimator=shmbridge ...

The Ray task that runs the trainer is the hub of the bridge.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray, validate_cfg

import shmbridge
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.skyrl.arrange import GroupDoesNotFit
from shmbridge.consumers.skyrl.config import (
    ConfigDoesNotFit,
    ShmTrainConfig,
    check,
    max_staleness,
    needs_logprobs,
)
from shmbridge.consumers.skyrl.generator import NobodyAsks, NoLogprobs, NotEvaluated, ShmGenerator
from shmbridge.consumers.skyrl.inference_client import ShmInferenceClient
from shmbridge.consumers.skyrl.prompts import EmptyPrompts
from shmbridge.consumers.skyrl.take import RolloutsOver
from shmbridge.consumers.skyrl.trainer import ShmAsyncTrainer, ShmTrainer, ShmTrainerSim

OVERRIDE = "trainer.override_entrypoint="
# What ends training and is no fault of a program: each says what to change.
TO_CHANGE = (
    shmbridge.ShmBridgeError, ConfigDoesNotFit, GroupDoesNotFit, NoAdvantages, NoLogprobs, NobodyAsks,
    NotEvaluated, RolloutsOver,
)  # fmt: skip


class ShmExp(BasePPOExp):
    """SkyRL's experiment with a bridge in place of its generator and its engines; a context manager.

    Args:
        cfg: a ShmTrainConfig.
        consumer: the hub; None: opened here, by the name in the config, and closed by `close`.

    Raises:
        ConfigDoesNotFit: a setting does not go with a bridge. ConsumerTaken: the bridge has a living hub.
    """

    def __init__(self, cfg: ShmTrainConfig, consumer: shmbridge.Consumer | None = None) -> None:
        check(cfg)
        self.cfg = cfg
        super().__init__(cfg)
        self._owned = consumer is None
        self.consumer = consumer or shmbridge.Consumer(cfg.bridge.name, run=self._run())

    def _run(self) -> shmbridge.Run:
        trainer, generator = self.cfg.trainer, self.cfg.generator
        steps = max(1, len(self.train_dataset) // trainer.train_batch_size) * trainer.epochs
        return shmbridge.Run(
            batch_size=trainer.train_batch_size * generator.n_samples_per_prompt,
            max_token_len=self.cfg.bridge.max_token_len,
            num_steps=min(steps, trainer.max_training_steps or steps),
        )

    def get_train_dataset(self) -> Any:
        """Returns SkyRL's data set, or empty prompts if `data.train_data` names no file."""
        if self.cfg.data.train_data:
            return super().get_train_dataset()
        return EmptyPrompts(self.cfg.trainer.train_batch_size * self.cfg.bridge.steps)

    def get_inference_client(self) -> ShmInferenceClient:
        """Returns the client that starts no engine, and publishes policy versions."""
        bridge = self.cfg.bridge
        return ShmInferenceClient(
            self.consumer, bridge.name, self.cfg.trainer.policy.model.path, bridge.engines
        )

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> ShmGenerator:
        """Returns the generator that reads the bridge."""
        return ShmGenerator(
            self.consumer,
            cfg.generator.n_samples_per_prompt,
            step_wise=cfg.generator.step_wise_trajectories,
            long_groups=cfg.bridge.long_groups,
            match=cfg.bridge.match,
            max_staleness=max_staleness(cfg),
            logprobs="all" if needs_logprobs(cfg) else "any",
            mask_truncated=cfg.generator.apply_overlong_filtering,
            timeout_s=cfg.bridge.timeout_s,
            prompts_per_step=cfg.trainer.policy_mini_batch_size
            if cfg.trainer.fully_async.enabled
            else cfg.trainer.train_batch_size,
        )

    def get_trainer(self, cfg: Any, **parts: Any) -> Any:
        """Returns the trainer of the config, over a bridge."""
        if cfg.trainer.fully_async.simulate_training:
            return ShmTrainerSim(cfg=cfg, **parts)
        if cfg.trainer.fully_async.enabled:
            return ShmAsyncTrainer(cfg=cfg, **parts)
        return ShmTrainer(cfg=cfg, **parts)

    def close(self) -> None:
        """Ends the generator's calls, and the hub if it was opened here. Releases nothing. Idempotent."""
        trainer = getattr(self, "trainer", None)
        if trainer is not None:
            trainer.generator.close()
        if self._owned:
            self.consumer.close()

    def __enter__(self) -> ShmExp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
