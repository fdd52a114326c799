"""SkyRL's program over a bridge.

    python -m skyrl.train.entrypoints.main_base \\
        trainer.override_entrypoint=shmbridge.consumers.skyrl.entrypoint \\
        bridge.name=run1 data.train_data=[] trainer.algorithm.advantage_estimator=shmbridge ...

The Ray task that runs the trainer is the consumer of the bridge.
"""

from __future__ import annotations

import os
import sys
import typing
from types import TracebackType
from typing import Any

import ray
import transformers
from skyrl.backends.skyrl_train.utils.io import io
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray, validate_cfg

import shmbridge
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.feed import Drained, Feed
from shmbridge.consumers.skyrl.arrange import GroupDoesNotFit
from shmbridge.consumers.skyrl.config import (
    ConfigDoesNotFit,
    ShmTrainConfig,
    check,
    max_staleness,
    needs_logprobs,
)
from shmbridge.consumers.skyrl.generator import NobodyAsks, NotEvaluated, ShmGenerator
from shmbridge.consumers.skyrl.inference_client import ShmInferenceClient
from shmbridge.consumers.skyrl.trainer import ShmAsyncTrainer, ShmTrainer, ShmTrainerSim
from shmbridge.consumers.trained_bridge import save_published

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
