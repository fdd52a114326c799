"""`ShmEnvManager`: an environment manager of ROLL whose episodes come from a bridge.

    custom_envs:
      gsm8k:
        env_type: shmbridge
        env_manager_cls: shmbridge.consumers.roll.env_manager.ShmEnvManager
        env_config: {bridge: run1}

An episode is one group of the bridge: a DataProto with a row per trajectory. So `group_size` is 1, and
`rollout_batch_size` counts groups. ROLL generates nothing: `actor_infer` is not asked.

Hub, release and what comes again after a kill: see the package's docstring. Letters: B rows, S the pipeline's
`sequence_length`, L tokens of one row.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import ray
import torch
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.env_manager.base_env_manager import BaseEnvManager

from shmbridge import BadArgument, ConsumerEmpty, InvalidRecord, Run
from shmbridge.config import check_bridge_name
from shmbridge.consumers.feed import (
    Feed,
    Refused,
    ReleaseAt,
    Step,
    bridge_info,
    check_words,
    refuse,
    require_start,
    setting,
    trained_as,
    warn_if_untested,
    warn_of_stale_rows,
)
from shmbridge.consumers.trajectories import Credit, Trajectory, columns_ignored
from shmbridge.weights import WeightsReader

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


WORD = "shmbridge"  # in the `trace_meta` of an environment manager: what `ShmAgenticPipeline` tells
_WORKER = "shmbridge.consumers.roll.actor_worker.ShmActorWorker"


def _by_worker(value: Any, config: Any) -> bool:
    return bool(value) and setting(config, "actor_train.worker_cls") == _WORKER


_KL = Refused("add_token_level_kl",
              "ROLL would subtract it from rewards, and what is trained are the bridge's advantages",
              "add_token_level_kl: false, use_kl_loss: true")  # fmt: skip
# What ROLL's own settings would do wrongly to rows of a bridge: with any of the ways to train,
REFUSED = (
    Refused("train_env_manager.group_size_redundancy", "ROLL would drop as many groups, uncounted",
            "train_env_manager.group_size_redundancy: 0"),
    Refused("critic_warmup",
            "no critic is trained, and these first steps would release their groups untrained",
            "critic_warmup: 0",
            lambda value, config: bool(value) and setting(config, "adv_estimator") != "gae"),
    replace(_KL, when=_by_worker),
    *(Refused(key, "ROLL would apply it to advantages of its own, which ShmActorWorker replaces",
              "pipeline_cls: shmbridge.consumers.roll.pipeline.ShmAgenticPipeline, without that worker_cls",
              _by_worker)
      for key in ("whiten_advantages", "advantage_clip", "use_opd", "is_pure_opd")),
)  # fmt: skip
# and with ShmAgenticPipeline.
REFUSED_BY_PIPELINE = (
    Refused("adv_estimator", "its critic would learn from returns that are not rewards",
            "adv_estimator: grpo", lambda value, config: value == "gae"),
    _KL,
)  # fmt: skip


_OWN: dict[str, Any] = {
    "rows": ("trajectory", "step"),
    "infer_logprobs": (True, False),
    "unfit": ("cut", "refuse", "leave_out"),
    "weights": (None, True, False),
    "start": (None, "from-scratch"),  # the adapter loads no weights
}


def env_configs_of(config: Any) -> dict[str, Mapping[str, Any]]:
    """Returns the `env_config` of each bridge that environments of an EnvManagerConfig read. Never blocks."""
    every = [each.get("config") or {} for one in (config.env_configs or {}).values() for each in one.values()]
    return {each["bridge"]: each for each in every if each.get("bridge")}


def workers_of(config: Any, bridge: str | None = None) -> list[int]:
    """Returns the ranks of the workers whose environments read a bridge; None: any. Never blocks.

    Args:
        config: ROLL's EnvManagerConfig.
        bridge: its name.
    """
    named = {
        rank: {(each.get("config") or {}).get("bridge") for each in configs.values()} - {None}
        for rank, configs in (config.env_configs or {}).items()
    }
    return [rank for rank, bridges in named.items() if (bridge in bridges if bridge else bridges)]


@dataclass(frozen=True)
class Settings:
    """The keys of `custom_envs.<tag>.env_config`.

    Args:
        bridge: the bridge to read.
        rows: "trajectory" makes a row of ROLL of each row of a group; "step" one of each step that has a
            step reward, for `adv_estimator` gigpo and step_reinforce.
        infer_logprobs: whether rows carry the sampler's log-probabilities. ROLL concatenates rows with equal
            columns only, so it is all rows or none; a row without them is refused if True.
        max_staleness: most steps between a group's policy version and the step that takes it; None: the
            pipeline's `async_generation_ratio`.
        unfit: what becomes of rows longer than the pipeline's `sequence_length`: "cut" trains the tokens that
            fit, "refuse" ends the run with the row's name, "leave_out" trains the others.
        set_aside_after: failures of a step after which its groups are tried apart until the one at fault is
            found and set aside, as Feed; 0: never.
        release_at: "step", or "checkpoint" if `ShmAgenticPipeline` saves some; None: "checkpoint" if it does
            so before the last step.
        weights: whether a version of the weights goes into the bridge with each step; None: where they can be
            gathered (`strategy_name: fsdp2_train`, no low-rank adapters), else a warning.
        start: "from-scratch" gives up what a bridge was trained to before; None refuses such a bridge, unless
            the run's own checkpoint is loaded.
        credit: fields of `Credit`, which says how advantages are made where a group has none.

    Raises:
        BadArgument, BadBridgeName: an unknown key, or a value that nothing can be done with.
    """

    bridge: str
    rows: Literal["trajectory", "step"] = "trajectory"
    infer_logprobs: bool = True
    max_staleness: int | None = None
    unfit: Literal["cut", "refuse", "leave_out"] = "cut"
    set_aside_after: int = 2
    release_at: ReleaseAt | None = None
    weights: bool | None = None
    start: Literal["from-scratch"] | None = None
    credit: Credit = field(default_factory=Credit)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Returns the settings of a mapping. Never blocks."""
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise BadArgument(
                f"env_config has {', '.join(unknown)}", hint=f"these keys are known: {', '.join(known)}"
            )
        if "bridge" not in given:
            raise BadArgument(
                "env_config names no bridge", hint="custom_envs.<tag>.env_config: {bridge: run1}"
            )
        values = dict(given)
        check_bridge_name(values["bridge"])
        check_words(values, "env_config.", BadArgument, **_OWN)
        try:
            values["credit"] = Credit(**(values.get("credit") or {}))
        except TypeError as wrong:
            raise BadArgument(
                f"env_config.credit: {wrong}", hint="docs/reference/advantages.md has its fields"
            ) from None
        return cls(**values)


ADVANTAGES = "shm_advantages"  # the column of per-token advantages
GROUP = "shm_records"  # the column of what names a group to the bridge's reader
STEP = "shm_step"  # the column of the step whose weights sampled a row
# Columns of a record that have a place in ROLL's rows.
READ = frozenset(
    {"tokens", "loss_mask", "masks", "prompt_length", "advantages", "inference_logprobs", "score"}
    | {"token_rewards", "step_rewards", "step_ends", "instance_id", "repetition_id", "finish_reason"}
)


@dataclass(frozen=True)
class RollRows:
    """Columns of B rows."""

    tensors: dict[str, npt.NDArray[Any]]  # name -> (B, S), or (B, S - 1) for what ROLL shifts by one
    objects: dict[str, npt.NDArray[np.object_]]  # name -> (B,)
    counts: dict[str, int] = field(default_factory=dict)  # what was changed on the way, and why


@dataclass(frozen=True)
class _Piece:
    """A row to make: the first `end` tokens of a trajectory, trained from `begin`."""

    trajectory: Trajectory
    begin: int
    end: int
    step: int
    reward: float | None  # of this step


def roll_rows(
    rows: Sequence[Trajectory],
    length: int,
    *,
    pad: int,
    logprobs: bool = True,
    by: Literal["trajectory", "step"] = "trajectory",
) -> RollRows:
    """Returns the columns of a group's rows. Never blocks; one copy of every token.

    Columns of one value per token are those ROLL's own environment managers make: `input_ids`,
    `attention_mask`, `position_ids` int64, `response_mask` (the trained tokens), `prompt_mask` bool, `scores`
    float32, all (B, S); `infer_logprobs` float32 (B, S - 1), value i belongs to token i + 1; and
    `shm_advantages`, laid out as that.

    Args:
        rows: of one group, at least one.
        length: S; longer rows lose their last tokens, which is counted.
        pad: token id of the padding.
        logprobs: fill `infer_logprobs`.
        by: "step" makes a row of each step reward.

    Raises:
        InvalidRecord: log-probabilities or step rewards are asked for, and a row has none.
    """
    pieces = [piece for row in rows for piece in (_steps(row) if by == "step" else [_whole(row)])]
    counts = {"rows": len(pieces), "rows_trimmed": 0, "tokens_trimmed": 0, "rows_unscored": 0}
    if by == "step":
        ends = [pieces[-1].end for pieces in map(_steps, rows)]
        counts["tokens_after_last_step"] = sum(
            int(row.trained[end:].sum()) for row, end in zip(rows, ends, strict=True)
        )
    count = len(pieces)
    tensors: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.full((count, length), pad, np.int64),
        "attention_mask": np.zeros((count, length), np.int64),
        "position_ids": np.zeros((count, length), np.int64),
        "response_mask": np.zeros((count, length), np.bool_),
        "prompt_mask": np.zeros((count, length), np.bool_),
        "scores": np.zeros((count, length), np.float32),
        ADVANTAGES: np.zeros((count, length - 1), np.float32),
    }
    if logprobs:
        tensors["infer_logprobs"] = np.zeros((count, length - 1), np.float32)
    for at, piece in enumerate(pieces):
        row, kept = piece.trajectory, min(piece.end, length)
        if kept < piece.end:
            counts["rows_trimmed"] += 1
            counts["tokens_trimmed"] += piece.end - kept
        trained = tensors["response_mask"][at]
        trained[piece.begin : kept] = row.trained[piece.begin : kept]
        tensors["input_ids"][at, :kept] = row.tokens[:kept]
        tensors["attention_mask"][at, :kept] = 1
        tensors["position_ids"][at, :kept] = np.arange(kept)
        tensors["prompt_mask"][at, : int(trained.argmax()) if trained.any() else kept] = True
        later = trained[1:kept]  # ROLL's column i is about token i + 1
        np.copyto(tensors[ADVANTAGES][at, : len(later)], row.advantages[1:kept], where=later)
        if logprobs:
            known = row.known_logprobs("env_config.infer_logprobs: false for all rows")
            np.copyto(tensors["infer_logprobs"][at, : len(later)], known[1:kept], where=later)
        counts["rows_unscored"] += _score(piece, tensors["scores"][at], kept)
    return RollRows(tensors, _objects(pieces), counts)


def _whole(row: Trajectory) -> _Piece:
    return _Piece(row, 0, len(row.tokens), 0, None)


def _steps(row: Trajectory) -> list[_Piece]:
    rewards, ends = row.value("step_rewards"), row.value("step_ends")
    if rewards is None or ends is None or not 0 < len(rewards) == len(ends):
        counted = [0 if each is None else len(each) for each in (rewards, ends)]
        raise InvalidRecord(
            f"{row.named} has {counted[0]} step_rewards and {counted[1]} step_ends",
            hint="rows: trajectory, or score the steps before the group is put (docs/how-to/rewards.md)",
            column="step_rewards",
            row=row.number,
        )
    bounds = [0, *(min(int(end), len(row.tokens)) for end in ends)]
    return [
        _Piece(row, begin, end, step, float(reward))
        for step, ((begin, end), reward) in enumerate(zip(pairwise(bounds), rewards, strict=True))
    ]


def _score(piece: _Piece, scores: npt.NDArray[np.float32], kept: int) -> bool:
    """Puts the rewards of a row on its tokens; ROLL sums them. Returns whether there were none."""
    row, last = piece.trajectory, max(kept - 1, 0)
    if piece.reward is not None:
        scores[last] = piece.reward
    elif (rewards := row.value("token_rewards")) is not None:
        scores[:kept] = rewards[:kept]
        scores[last] += rewards[kept:].sum()
    elif row.score is not None:
        scores[last] = row.score
    else:
        return True
    return False


def _objects(pieces: Sequence[_Piece]) -> dict[str, npt.NDArray[np.object_]]:
    by_step = pieces[0].reward is not None
    columns: dict[str, list[Any]] = {
        "episode_scores": [_episode_score(piece.trajectory) for piece in pieces],
        "step_scores": [_step_scores(piece) for piece in pieces],
        "shm_group": [piece.trajectory.meta.group_id for piece in pieces],
        "shm_instance": [piece.trajectory.instance_id for piece in pieces],
        "shm_repetition": [piece.trajectory.repetition_id for piece in pieces],
        "shm_finish_reason": [piece.trajectory.finish_reason or "" for piece in pieces],
        "shm_min_version": [int(piece.trajectory.meta.min_policy_version) for piece in pieces],
        "shm_max_version": [int(piece.trajectory.meta.max_policy_version) for piece in pieces],
    }
    if by_step:
        columns["step"] = [piece.step for piece in pieces]
        columns["state_hash"] = [
            hashlib.sha256(piece.trajectory.tokens[: piece.begin].tobytes()).hexdigest() for piece in pieces
        ]
    return {name: objects(values) for name, values in columns.items()}


def objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """Returns an object array (B,) of any values, lists among them. Never blocks."""
    column = np.empty(len(values), np.object_)
    column[:] = values
    return column


def _episode_score(row: Trajectory) -> float:
    if row.score is not None:
        return row.score
    rewards = row.value("token_rewards")
    return 0.0 if rewards is None else float(rewards.sum())


def _step_scores(piece: _Piece) -> Any:
    """One number in a row of a step, as gigpo wants it; else a list, as ROLL logs it."""
    if piece.reward is not None:
        return piece.reward
    rewards = piece.trajectory.value("step_rewards")
    return [_episode_score(piece.trajectory)] if rewards is None else [float(each) for each in rewards]


# How long one thread waits before it looks whether it should stop: longer than the feed waits before it asks
# the consumer whether a step fits into the lanes.
_LOOK_S = 3.0


class BridgeReader:
    """A feed for any number of threads. Made by `join`, ended by the last `leave`.

    Args:
        bridge: its name.
        lag: steps that may lie between taking a group and training it: `async_generation_ratio`.
        word: of `ShmAgenticPipeline` before its first step: `states`, by bridge, of the loaded checkpoint;
            None: another pipeline runs.
        options: of the Feed.

    Attributes:
        feed: where groups come from.
    """

    _open: ClassVar[dict[str, BridgeReader]] = {}
    _opening = threading.Lock()

    def __init__(
        self, bridge: str, lag: int, word: Mapping[str, Any] | None, options: dict[str, Any]
    ) -> None:
        self._lag, self._told, self._options = lag, word is not None, {"lag": lag, **options}
        if word is None and options.get("release_at") == "checkpoint":
            raise BadArgument(
                'env_config.release_at is "checkpoint", and nothing tells an environment when one is saved',
                hint="pipeline_cls: shmbridge.consumers.roll.pipeline.ShmAgenticPipeline",
            )
        self.feed = Feed(bridge, exact=True, **options | ({} if self._told else {"release_at": "step"}))
        if word is not None and bridge in (states := word.get("states", {})):
            self.feed.load_state_dict(states[bridge])
        self._lock = threading.Lock()  # around what is held, and the step; never for long
        self._held: dict[str, tuple[int, Step]] = {}  # by name: the step in which it was put, and the group
        self._users = 0
        self._step: int | None = None
        self._first_version = 0  # the version of step 0

    @classmethod
    def join(
        cls, bridge: str, lag: int, word: Mapping[str, Any] | None = None, **options: Any
    ) -> BridgeReader:
        """Returns the process's reader of a bridge. Blocks while the first one adopts the lanes.

        Raises:
            BadArgument: it is open with other numbers, or `release_at` is not possible.
            ConsumerTaken: another process reads the bridge; the message names its pid.
        """
        with cls._opening:
            if bridge not in cls._open:
                cls._open[bridge] = cls(bridge, lag, word, options)
            there, wanted = cls._open[bridge], {"lag": lag, **options}
            if other := [key for key, value in wanted.items() if value != there._options.get(key)]:
                have, want = ({key: of.get(key) for key in other} for of in (there._options, wanted))
                raise BadArgument(
                    f"bridge {bridge!r} is read with {have}, and asked for with {want}",
                    hint="give each tag a bridge of its own",
                )
            there._users += 1
            return there

    def leave(self, *, orderly: bool) -> None:
        """Ends one user's part; the last one closes the feed. Once per `join`; blocks for a moment.

        Args:
            orderly: the pipeline ended: what the last steps trained is released. Otherwise nothing is, and
                the next consumer gets it again.
        """
        with self._opening:
            self._users -= 1
            if self._users:
                return
            del self._open[self.feed.consumer.bridge]
            if orderly and self._step is not None and not self._told:
                self._end_before(self._step + 1)
            broken = None if orderly else SystemExit()  # no failure of a step
            self.feed.__exit__(None, broken, None)

    def begin_step(self, step: int) -> None:
        """Publishes the step's policy version, and ends what no step from here on trains. Any thread.

        Never blocks for records; again for the same step does nothing. Raises BridgeAhead as Feed.begin_run.
        """
        with self._lock:
            if self._step is not None and step <= self._step:
                return
            first, self._step = self._step is None, step
            if first:
                self._begin(step)
        if not first:
            self._end_before(step)

    def _begin(self, step: int) -> None:
        known, bridge = self.feed.consumer.policy_version, self.feed.consumer.bridge
        with WeightsReader(bridge) as reader:
            weights = reader.version
        # above what is published: the actor has written the weights of this step
        version = max(step, known) if weights is None or weights <= known else weights
        self._first_version = version - step
        if self._first_version:
            log.warning("bridge %r is at version %d, the pipeline at step %d", bridge, version, step)
        self.feed.begin_run(version)

    def _end_before(self, step: int) -> None:
        """Ends the groups whose last possible step is before this one."""
        with self._lock:
            over = [name for name, (put, _) in self._held.items() if put + self._lag < step]
            groups = [self._held.pop(name)[1] for name in over]
        if groups and self._told:  # the pipeline would have told that it trained them
            self.feed.dropped(groups, "by_roll")
        elif groups:
            self.feed.trained(groups)
        if self.feed.consumer.policy_version < (version := self._first_version + step):
            self.feed.consumer.publish_policy_version(version)

    def told(self, word: Mapping[str, Any]) -> None:
        """Does what `ShmAgenticPipeline` tells; again for the same word does nothing. Any thread.

        Args:
            word: `groups`, the names of groups that were trained, or, with `failed`, at which a step failed;
                `saved`, the states in a checkpoint that is durable, by bridge.

        Raises:
            Exception: the failure itself, where nothing is set aside.
        """
        with self._lock:
            over = [self._held.pop(name)[1] for name in word.get("groups", ()) if name in self._held]
        if over and (failed := word.get("failed")):
            self.feed.failed(over, (MemoryError if "Memory" in failed else RuntimeError)(failed))
        elif over:
            self.feed.trained(over)  # its version is published with the next step's weights
        if saved := word.get("saved", {}).get(self.feed.consumer.bridge):
            self.feed.checkpointed(saved)

    def take(self, stopped: Callable[[], bool]) -> Step | None:
        """Returns the next group, leased; None once `stopped()`. Blocks until then; any thread.

        Raises:
            Drained: nothing will come any more. BatchTooBig, UnfitRow, BridgeAhead: as Feed.take.
        """
        with self.feed.consumer.one_wait():
            while not stopped():
                try:
                    return self.feed.take(_LOOK_S, groups=1)
                except ConsumerEmpty:
                    continue
        return None

    def begun(self, step: Step) -> int | None:
        """Returns the pipeline's step whose weights began the group; None: nobody stamped it."""
        oldest = step.groups[0].oldest_version
        return oldest - self._first_version if oldest >= 0 else None

    def put(self, step: Step) -> str:
        """Notes that ROLL gets the group now, which is held until it is trained; returns the group's name.

        Never blocks.
        """
        name = json.dumps({"bridge": self.feed.consumer.bridge, **self.feed.state_of(step)})
        with self._lock:
            self._held[name] = self._step or 0, step
        return name

    def take_back(self, name: str, why: str) -> None:
        """Releases a group that ROLL did not take after all, counted as dropped. Never blocks."""
        with self._lock:
            _, step = self._held.pop(name)
        self.feed.dropped(step, why)
