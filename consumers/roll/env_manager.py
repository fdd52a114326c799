"""`ShmEnvManager`: an environment manager of ROLL whose episodes come from a bridge.

    custom_envs:
      gsm8k:
        env_type: shmbridge
        env_manager_cls: shmbridge.consumers.roll.env_manager.ShmEnvManager
        env_config: {bridge: run1}

An episode is one group of the bridge: a DataProto with a row per trajectory. So `group_size` is 1, and
`rollout_batch_size` counts groups. ROLL generates nothing: `actor_infer` is not asked.

Hub, release and what comes again after a kill: see the package's docstring.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
import torch
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.env_manager.base_env_manager import BaseEnvManager

from shmbridge import BadArgument, Run
from shmbridge.consumers.feed import Step
from shmbridge.consumers.roll.bridge_reader import BridgeReader
from shmbridge.consumers.roll.rows import GROUP, READ, STEP, RollRows, objects, roll_rows
from shmbridge.consumers.roll.settings import REFUSED, WORD, Settings, workers_of
from shmbridge.consumers.tested_versions import warn_if_untested
from shmbridge.consumers.trained_bridge import bridge_info, require_start, trained_as
from shmbridge.consumers.trainer_settings import refuse, warn_of_stale_rows
from shmbridge.consumers.trajectories import columns_ignored

log = logging.getLogger(__name__)

_BRACES = str.maketrans({"{": "/", "}": None})


class ShmEnvManager(BaseEnvManager):
    """Puts groups of a bridge into ROLL's queue, one per episode.

    ROLL makes it, and runs `run_rollout_loop` in a thread of its environment worker. Arguments are those of
    ROLL's `TrajEnvManager`; `env_config["config"]` has the keys of `Settings`.

    Raises:
        BadArgument: `group_size` is not 1, several workers name the bridge, a key of `env_config` is wrong,
            or a setting of the pipeline is refused. The bridge is opened in `run_rollout_loop`, not here.
        BridgeAhead: the bridge was trained before, and the pipeline resumes no checkpoint.
    """

    def __init__(
        self,
        worker_config: Any,
        pipeline_config: Any,
        env_config: Any,
        tokenizer: Any,
        generate_scheduler: Any,
        output_queue: Any,
        thread_lock: Any,
        mode: str = "train",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        warn_if_untested("roll", "0.3", "0.4")
        self.env = None
        self.env_config, self.output_queue, self.mode = env_config, output_queue, mode
        self.pipeline_config = pipeline_config
        self.settings = Settings.of(_plain(env_config["config"]))
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        self._pad = int((end or 0) if pad is None else pad)
        self._reader: BridgeReader | None = None
        self._word: dict[str, Any] | None = None  # the pipeline's first
        self._lag = int(pipeline_config.async_generation_ratio) if mode == "train" else 0
        if worker_config.group_size != 1:
            raise BadArgument(
                f"{mode}_env_manager.group_size is {worker_config.group_size}: a group of the bridge is one "
                "rollout here, whatever its size",
                hint="group_size: 1; rollout_batch_size then counts groups",
            )
        if len(workers := workers_of(worker_config, self.settings.bridge)) > 1:
            raise BadArgument(
                f"bridge {self.settings.bridge!r} is named by the environments of {len(workers)} workers, "
                "and has one reader",
                hint="max_env_num_per_worker: 0 puts all environments into one worker",
            )
        refuse(REFUSED, pipeline_config, BadArgument)
        if not pipeline_config.resume_from_checkpoint:  # now: later the actor has published its weights
            bridge = self.settings.bridge
            require_start(bridge, trained_as(bridge_info(bridge)), self.settings.start, None)
        self._warns = not self.settings.infer_logprobs

    def run_rollout_loop(self, data: DataProto) -> None:
        """Puts groups until ROLL has no more episodes or calls `stop`. Blocks; in a thread of ROLL's.

        Args:
            data: `meta_info["seed"]` names the episodes of this run.

        Raises:
            ConsumerTaken: another process reads the bridge. InvalidRecord: see `roll_rows`. NoAdvantages.
                After an error nothing is released: the next reader gets the groups again, and sets the one
                at fault aside.
        """
        self.running = True
        seed = data.meta_info["seed"] + self.env_config["group_seed"]
        group_id, env_id = self.env_config["group_id"], self.env_config["env_id"]
        reader = self._join()
        orderly = False
        try:
            if self.current_step >= 0:  # ROLL may have called update_step before this thread began
                reader.begin_step(self.current_step)
            while (episode := self._episode(group_id, env_id)) is not None:
                name = f"{self.env_config['tag']}_{group_id}_{episode}_{seed}"
                if not self._put_one(reader, episode, name):
                    break
            ray.get(self.output_queue.put.remote(group_id, episode, self.current_step, None, env_id))
            orderly = True
        finally:
            self._reader = None
            reader.leave(orderly=orderly)

    def update_step(self, global_step: int, trace_meta: Any = None) -> None:
        """The pipeline begins a step, or, with `WORD` in `trace_meta`, `ShmAgenticPipeline` tells something.

        Called by ROLL.
        """
        reader, word = self._reader, (trace_meta or {}).get(WORD)
        if word is None:
            super().update_step(global_step, trace_meta)
            if reader is not None:
                reader.begin_step(global_step)
        elif reader is not None:
            reader.told(word)
        else:
            self._word = word

    def rollout_of(self, step: Step) -> tuple[DataProto, RollRows]:
        """Returns a group as ROLL's rows, and their columns, whose memory they share. Never blocks."""
        settings = self.settings
        columns = roll_rows(
            step.rows,
            self.pipeline_config.sequence_length,
            pad=self._pad,
            logprobs=settings.infer_logprobs,
            by=settings.rows,
        )
        tensors = {name: torch.from_numpy(array) for name, array in columns.tensors.items()}
        return DataProto.from_dict(tensors, non_tensors=dict(columns.objects)), columns

    def _join(self) -> BridgeReader:
        pipeline, settings = self.pipeline_config, self.settings
        size = max(1, pipeline.rollout_batch_size if self.mode == "train" else pipeline.val_batch_size)
        steps = pipeline.max_steps if pipeline.max_steps > 0 else (1 << 31) - 1
        every = pipeline.save_steps if pipeline.save_steps < steps else -1
        whole = settings.unfit == "cut"
        reader = self._reader = BridgeReader.join(
            settings.bridge,
            self._lag,
            self._word,
            groups=size,
            run=Run(
                batch_size=size,
                max_token_len=pipeline.sequence_length,
                num_steps=steps,
                save_checkpoint_interval=every,
            ),
            run_dir=pipeline.output_dir,
            max_staleness=self._lag if settings.max_staleness is None else settings.max_staleness,
            release_at=settings.release_at,
            set_aside_after=settings.set_aside_after,
            unfit="refuse" if whole else settings.unfit,
            longest_row=None if whole else pipeline.sequence_length,
            credit=settings.credit,
            start="from-scratch",  # looked at before there were weights: in `__init__`, or by the pipeline
        )
        return reader

    def _episode(self, group_id: int, env_id: int) -> int | None:
        if not self.running:
            return None
        episode: int | None = ray.get(self.output_queue.get_episode_id.remote(group_id, env_id))
        return episode

    def _put_one(self, reader: BridgeReader, episode: int, name: str) -> bool:
        """Puts a group for an episode; returns whether there was one before `stop`."""
        while (step := reader.take(lambda: not self.running)) is not None:
            if not step.rows:
                reader.feed.dropped(step, "unfit")
                continue
            try:
                rollout, columns = self.rollout_of(step)
            except Exception as error:
                reader.feed.failed(step, error)
                raise
            begun = reader.begun(step)
            began = self.current_step if begun is None else min(begun, self.current_step)
            if began < self.current_step and self._warns:
                self._warns = False
                how = "env_config.infer_logprobs: true, and environments that record inference_logprobs"
                warn_of_stale_rows(self.settings.bridge, len(rollout), how)
            group = reader.put(step)  # first: ROLL may train it before this thread goes on
            self._name(rollout, name, began, group)
            rollout.meta_info = {"metrics": self._metrics(step, columns, reader)}
            group_id, env_id = self.env_config["group_id"], self.env_config["env_id"]
            try:
                ray.get(self.output_queue.put.remote(group_id, episode, began, rollout, env_id))
            except AssertionError as older:
                # ROLL takes no rollout begun before its episode; another may be new enough.
                reader.take_back(group, "refused_stale")
                log.warning("group %s is too old for ROLL: %s", step.batch.meta[0].group_id, older)
                continue
            return True
        return False

    def _name(self, rollout: DataProto, name: str, began: int, group: str) -> None:
        count, config = len(rollout), self.env_config
        columns = {
            "env_ids": [config["env_id"]] * count,
            "group_ids": [config["group_id"]] * count,
            "tags": [config["tag"]] * count,
            "traj_group_id": [name] * count,
            "traj_id": [f"{name}_{each}" for each in self._trajectory_numbers(rollout)],
            STEP: [began] * count,
            GROUP: [group] * count,
        }
        rollout.non_tensor_batch.update({key: objects(values) for key, values in columns.items()})

    def _trajectory_numbers(self, rollout: DataProto) -> list[int]:
        """Returns the number of each row's trajectory; the steps of one follow each other."""
        if "step" not in rollout.non_tensor_batch:
            return list(range(len(rollout)))
        numbers, number = [], -1
        for step in rollout.non_tensor_batch["step"]:
            number += step == 0
            numbers.append(number)
        return numbers

    def _metrics(self, step: Step, columns: RollRows, reader: BridgeReader) -> dict[str, float]:
        ignored = columns_ignored(step.batch, READ)
        counts = {name.translate(_BRACES): count for name, count in reader.feed.counts.copy().items()}
        trained = columns.tensors["response_mask"].sum(-1)
        return {
            "env/response_length": float(trained.mean()),
            **{f"shm/{name}@sum": float(count) for name, count in columns.counts.items()},
            **{f"shm/columns_ignored/{name}@sum": float(rows) for name, rows in ignored.items()},
            **{f"shm/{name}@max": float(count) for name, count in counts.items()},
        }


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns dicts in place of omegaconf's mappings, which `Credit` and others do not know."""
    return {key: _plain(value) if hasattr(value, "items") else value for key, value in config.items()}
