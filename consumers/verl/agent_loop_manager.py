"""verl's agent loop manager over a bridge: environments elsewhere play, a thread here writes their rows.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class:
      shmbridge.consumers.verl.agent_loop_manager.ShmAgentLoopManager

The environments own prompts and grouping. verl issues uids, and each whole group of the bridge is folded
onto one of them: `generate_sequences` notes the uids and returns; the thread takes as many groups, writes
their rows into TransferQueue (`kv_batch_put`), then sets the tags of the uids to finished.

The hub is this object's feed, in verl's TaskRunner process; verl's actors never see the bridge's records.
Groups that verl drops as stale, and all groups under verl's own trainer modes, are released at the next
`generate_sequences` after verl has removed their rows. Otherwise `trainer.py` says when a step is over; what
comes again after a kill: docs/how-to/verl.md.

A row's key is `{uid}_{session}_{index}`: the session is the rollout, the index counts the rows of one
rollout. Values are gathered once, from the batch's arrays into one array per field, and become jagged tensors
without another copy.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch.utils.data import Dataset
from verl.utils import tensordict_utils

import shmbridge
from shmbridge import ConsumerEmpty
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.feed import Feed, Step
from shmbridge.consumers.trajectories import Trajectory, columns_ignored
from shmbridge.consumers.verl.settings import (
    MODE,
    VALIDATES,
    Form,
    Settings,
    form_of,
    longest_row,
    release_at,
    steps_until_taken,
)
from shmbridge.record import Group
from shmbridge.weights import WeightsReader

log = logging.getLogger(__name__)

_PARTITION = "train"
_ANY_LENGTH = 1 << 20
_NO_LAST_STEP = 1 << 30
_Order = tuple[list[str], int]  # uids of a call of generate_sequences, and verl's global_steps
_COUNTED = ("feed_", "left_out_", "discarded_")  # of the feed's counters, in verl's log


class _Folded(NamedTuple):
    """One group of the bridge, under the uid it was folded onto."""

    step: Step  # of this group alone
    keys: list[str]  # of its rows in TransferQueue
    summary: GroupSummary


class ShmAgentLoopManager:
    """Folds a bridge's groups onto verl's prompts; see this module. Call it from verl's thread.

    Args:
        config: verl's whole configuration; `trainer.atropos` has the bridge's keys.

    Attributes:
        feed: the bridge's Feed, whose steps are single groups here.

    Raises:
        ValueError: the configuration asks for what a bridge cannot give; names the key.
        ConsumerTaken: another process reads this bridge.
    """

    def __init__(self, config: Any) -> None:
        self._settings = settings = Settings.of(config)
        mode = config.trainer.v1.trainer_mode
        self._is_told = mode == MODE  # of checkpoints, by the trainer
        if settings.start == "from-bridge" and mode != MODE:
            raise ValueError(
                f"trainer.atropos.start=from-bridge with trainer_mode={mode}, which does not load the "
                f"bridge's weights -> trainer.v1.trainer_mode={MODE}, or trainer.atropos.start=from-scratch"
            )
        self._form = form_of(config)
        self._rows_of_group = int(config.actor_rollout_ref.rollout.n)
        self._weights = _weights_reader(config, settings)
        self._folded: dict[str, _Folded] = {}  # by uid, until verl is done with them
        self._counts: Counter[str] = Counter()
        self._error: BaseException | None = None  # what ended the thread
        self._closing = threading.Event()
        self._ahead = 0  # versions that the bridge is ahead of verl's steps
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()  # None ends the thread
        per_step, longest = int(config.data.train_batch_size), longest_row(config, settings)
        run = shmbridge.Run(
            batch_size=max(per_step * self._rows_of_group, 1),
            max_token_len=longest or _ANY_LENGTH,
            num_steps=int(config.trainer.get("total_training_steps", None) or _NO_LAST_STEP),
            checkpoint_dir=config.trainer.default_local_dir,
            save_checkpoint_interval=config.trainer.save_freq,
        )
        limit, begun_within = settings.max_off_policy_steps, steps_until_taken(config, settings)
        self.feed = Feed(
            settings.bridge,
            groups=per_step,
            exact=True,
            run=run,
            release_at=release_at(config, settings),
            max_staleness=limit,
            set_aside_after=settings.set_aside_after,
            unfit=settings.unfit,
            longest_row=longest,
            credit=settings.credit,
            whole_rows=settings.whole_rows,
            start=settings.start,
            lanes=settings.lanes,
            policy="fair" if limit is None else "oldest",
            max_off_policy_steps=begun_within,
            groups_per_step=None if limit is None else per_step,
        )
        self._thread = threading.Thread(target=self._drain, name="shmbridge-verl", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any = None,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> Self:
        """Returns a manager, as verl asks for one: its clients are not used. Raises as the class."""
        return cls(config)

    # -- calls of verl

    def generate_sequences(self, prompts: Any) -> None:
        """Asks for one group per prompt, and returns at once.

        Never waits for groups. Releases the groups that verl has cleared meanwhile.

        Args:
            prompts: a TensorDict with `uid` per row and `global_steps`; all else in it is not read.

        Raises:
            ValueError: prompts of validation.
            ConsumerEmpty, Drained, NoAdvantages, NoLogprobs, ...: what ended the thread; the groups in its
                hands are not released.
        """
        if prompts.get("validate"):
            raise ValueError(VALIDATES)
        if self._error is not None:
            raise self._error
        step = int(prompts["global_steps"])
        if not self._is_told and step > 1:
            self.feed.load_state_dict(self.feed.state_dict())  # verl has loaded a checkpoint
        self._is_told = True
        self._follow_weights(step)
        self.release_cleared()
        self._orders.put(([str(uid) for uid in prompts["uid"]], step))

    def step_ended(self, keys: Collection[str], version: int | None = None) -> dict[str, float]:
        """Notes that the groups of a step are trained, and returns the step's metrics. Never blocks.

        They are released, or held for a checkpoint: see this module.

        Args:
            keys: the rows that were trained, verl's `{uid}_{session}_{index}`; others, such as padding, are
                skipped.
            version: of the weights that the step made; published to the environments.
        """
        trained = self._pop(dict.fromkeys(key.split("_")[0] for key in keys))
        newer = version if version is not None and version > self.feed.consumer.policy_version else None
        if trained:
            self.feed.trained([each.step for each in trained], version=newer)
        elif newer is not None:
            self.feed.consumer.publish_policy_version(newer)
        return {
            **atropos_metrics([each.summary for each in trained]),
            **{f"shmbridge/{name}": count for name, count in self.stats().items()},
        }

    def step_failed(self, error: BaseException) -> None:
        """Notes that verl's step raised an error: a resumed run tries its groups apart. Never raises.

        Blocks for the disk, and for one question to TransferQueue.
        """
        try:
            if sampled := self._taken(cleared=False):
                self.feed.failed([each.step for each in sampled], error)
        except BaseException as raised:
            if raised is not error:
                log.exception("the failed step is not noted, so its groups come again as if nothing was")

    def release_cleared(self) -> int:
        """Releases the held groups of which TransferQueue has no row any more; returns how many.

        Blocks for one question to TransferQueue, if anything is held.
        """
        cleared = self._taken(cleared=True) if self._folded else []
        if cleared:
            self.feed.dropped([each.step for each in cleared], "cleared")
        return len(cleared)

    def stats(self) -> dict[str, float]:
        """Returns counters, flat: what was folded, released, left out, and why. Never blocks."""
        return {
            **{f"{name}_total": float(count) for name, count in sorted(self._counts.items())},
            **{name: count for name, count in self.feed.stats().items() if name.startswith(_COUNTED)},
            "groups_held": float(len(self._folded)),
        }

    def close(self) -> None:
        """Gives the bridge up; releases nothing. Idempotent; blocks for the thread."""
        self._closing.set()
        self.feed.close()  # ends the wait for groups
        self._orders.put(None)
        self._thread.join()
        self._folded.clear()
        if self._weights is not None:
            self._weights.close()

    def _pop(self, uids: Iterable[str]) -> list[_Folded]:
        return [self._folded.pop(uid) for uid in uids if uid in self._folded]

    def _taken(self, *, cleared: bool) -> list[_Folded]:
        """Takes out the groups whose prompts verl has removed, and whose rows it has cleared or has not."""
        there = (tq.kv_list(_PARTITION) or {}).get(_PARTITION, {}).keys()
        folded = list(self._folded.items())
        return self._pop(
            [uid for uid, each in folded if uid not in there and there.isdisjoint(each.keys) == cleared]
        )

    # -- the thread

    def _drain(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._fill(order)
            except BaseException as error:
                if not self._closing.is_set():
                    self._fail(order, error)
                return

    def _fill(self, order: _Order) -> None:
        """Takes the groups of an order and writes them."""
        uids, at_step = order
        try:
            step = self.feed.take(self._settings.patience_s, groups=len(uids))
        except ConsumerEmpty as none:
            hint = "start environments on this bridge, or raise trainer.atropos.max_wait_time, timeout or "
            raise ConsumerEmpty(none.message, hint=f"{hint}retry_attempts") from None
        versions = [self._steps_of(group, at_step) for group in step.groups]
        try:
            rows = rows_of(step.rows, uids, versions, self._form)
        except Exception as error:
            if isinstance(error, NoAdvantages):
                words = str(error).split(" -> ")[0]
                error = NoAdvantages(f"{words} -> trainer.atropos.fallback_to_grpo=true")
            self.feed.failed(step, error)
            raise error from None
        self._count(step, rows)
        keys: dict[str, list[str]] = {uid: [] for uid in uids}
        for key in rows.keys:
            keys[key.split("_")[0]].append(key)
        empty, tags, group_of = [], [], step.batch.group_index
        for number, part in enumerate(self.feed.parts(step)):
            uid, (oldest, _) = uids[number], versions[number]
            if keys[uid]:
                of_it = [row for row in step.rows if group_of[row.row] == number]
                self._folded[uid] = _Folded(part, keys[uid], summary_of(of_it))
            else:  # verl replaces it
                empty.append(part)
            # verl's prompts of step s are sampled under the weights of s - 1
            status = "finished" if keys[uid] else "failure"
            tags.append({"is_prompt": True, "status": status, "global_steps": oldest + 1})
        if rows.fields is not None:
            tq.kv_batch_put(keys=rows.keys, partition_id=_PARTITION, fields=rows.fields, tags=rows.tags)
        tq.kv_batch_put(keys=uids, partition_id=_PARTITION, tags=tags)  # verl may sample them now
        if empty:
            self.feed.dropped(empty, "no_response")

    def _fail(self, order: _Order, error: BaseException) -> None:
        """Keeps the error for verl's next call, and wakes a trainer that waits for the order."""
        # As text: a traceback would keep the groups, and with them the bridge, from a successor.
        log.error("no more rows for verl: %s", "".join(traceback.format_exception(error)))
        error.__context__ = error.__cause__ = None
        self._error = error.with_traceback(None)
        try:
            tags = [{"is_prompt": True, "status": "failure", "global_steps": 0} for _ in order[0]]
            tq.kv_batch_put(keys=order[0], partition_id=_PARTITION, tags=tags)
        except Exception:
            log.exception("TransferQueue does not take the failure either")

    # -- what groups are

    def _steps_of(self, group: Group, at_step: int) -> tuple[int, int]:
        """Returns the smallest and largest version of a group, in verl's steps."""
        newest = max(record.meta.max_policy_version for record in group.records)
        if (oldest := group.oldest_version) < 0:
            self._counts["groups_without_version"] += 1
            return at_step - 1, at_step - 1
        return oldest - self._ahead, newest - self._ahead

    def _count(self, step: Step, rows: Rows) -> None:
        self._counts.update(rows.counts)
        self._counts["rows"] += len(rows.keys)
        self._counts["groups_uneven"] += sum(group.rows != self._rows_of_group for group in step.groups)
        self._counts["groups_fallback"] += int(step.metrics["groups_fallback"])
        for name, count in columns_ignored(step.batch, COLUMNS).items():
            self._counts[f"columns_ignored{{{name}}}"] += count

    def _follow_weights(self, step: int) -> None:
        """Publishes the version that verl's weights have, and notes how it differs from verl's steps."""
        current, known = step - 1, self.feed.consumer.policy_version
        if self._weights is not None and (written := self._weights.version) is not None:
            self._ahead = written - current
        elif known > current + self._ahead:  # an earlier run's
            self._ahead = known + 1 - current
        if (version := current + self._ahead) > known:
            self.feed.consumer.publish_policy_version(version)


def _weights_reader(config: Any, settings: Settings) -> WeightsReader | None:
    """Returns a reader of the versions that the checkpoint engine writes; None if it is another engine."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.backend != "shmbridge":
        return None
    named = (engine.engine_kwargs.get("shmbridge", None) or {}).get("bridge", settings.bridge)
    return WeightsReader(named)


# What is read of a record; all other columns are counted by name.
COLUMNS = frozenset(
    (
        *("tokens", "prompt_length", "loss_mask", "advantages", "score", "inference_logprobs"),
        *("repetition_id", "instance_id", "finish_reason", "temperature", "turn_ends", "reward_components"),
    )
)
_WITHOUT = (
    "algorithm.rollout_correction.bypass_mode=False actor_rollout_ref.rollout.calculate_log_probs=False"
)


class NoScore(ValueError):
    """verl computes advantages itself, or filters groups by score, and a row has none."""


@dataclass
class Rows:
    """Rows ready for one `kv_batch_put`, and where each belongs."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    fields: TensorDict | None = None  # None: no row
    counts: Counter[str] = field(default_factory=Counter)  # what was left out or differs, by reason


def rows_of(
    found: Sequence[Trajectory], uids: Sequence[str], first_versions: Sequence[tuple[int, int]], form: Form
) -> Rows:
    """Returns the rows of whole groups. Never blocks.

    Rows without a response are left out. The first token of a row has no log-probability: a row without a
    prompt loses it to the prompt. Both are counted.

    Args:
        found: the rows, those of a group side by side.
        uids: verl's prompt of each group, in the order of the groups; without "_".
        first_versions: smallest and largest version of each group, in verl's steps.
        form: what verl's configuration asks of a row.

    Raises:
        NoLogprobs: `form.logprobs`, and a row has none.
        NoScore: `form.scored`, or not `form.per_token`, and a row has no score.
    """
    rows, kept = Rows(), []
    sessions: Counter[tuple[int, int]] = Counter()
    for each in found:
        if (start := _response_start(each, rows.counts)) is None:
            continue
        group = int(each.batch.group_index[each.row])
        session = each.repetition_id
        rows.keys.append(f"{uids[group]}_{session}_{sessions[group, session]}")
        sessions[group, session] += 1
        low, high = first_versions[group]
        rows.tags.append(_tag(each, start, low, high))
        _check_temperature(each, form, rows.counts)
        kept.append((each, start, uids[group], (low, high)))
    if kept:
        rows.fields = _fields(kept, form)
    return rows


_Kept = tuple[Trajectory, int, str, tuple[int, int]]  # row, start of its response, uid, versions


def _response_start(row: Trajectory, counts: Counter[str]) -> int | None:
    """Returns the first token of verl's response, at least 1; None if there is no response."""
    start = max(row.prompt_length, 1)
    if start >= len(row.tokens):
        counts["rows_without_response"] += 1
        return None
    mask = row.value("loss_mask")
    if row.prompt_length == 0 if mask is None else mask[0]:
        counts["first_tokens_untrained"] += 1
    return start


def _tag(row: Trajectory, start: int, low: int, high: int) -> dict[str, Any]:
    return {
        "status": "success",
        "prompt_len": start,
        "response_len": len(row.tokens) - start,
        "seq_len": len(row.tokens),
        "global_steps": low + 1,
        "min_global_steps": low,
        "max_global_steps": high,
    }


def _check_temperature(row: Trajectory, form: Form, counts: Counter[str]) -> None:
    sampled = row.value("temperature")
    if sampled is not None and not np.isclose(sampled, form.temperature, rtol=1e-3):
        counts["rows_of_other_temperature"] += 1


def _fields(kept: Sequence[_Kept], form: Form) -> TensorDict:
    starts = [start for _, start, _, _ in kept]
    tokens = [row.tokens for row, _, _, _ in kept]
    masks = _jagged((row.trained[start:] for row, start, _, _ in kept), np.int64)
    values: dict[str, Any] = {
        "prompts": _jagged((row[:start] for row, start in zip(tokens, starts, strict=True)), np.int64),
        "responses": _jagged((row[start:] for row, start in zip(tokens, starts, strict=True)), np.int64),
        "input_ids": _jagged(tokens, np.int64),
        "position_ids": _jagged((np.arange(len(row)) for row in tokens), np.int64),
        "response_mask": masks,
        "loss_mask": masks,
        "rm_scores": _jagged((_rewards(row, start, form) for row, start, _, _ in kept), np.float32),
        "uid": [uid for _, _, uid, _ in kept],
        "num_turns": [_turns(row) for row, _, _, _ in kept],
        "multi_modal_inputs": [{} for _ in kept],
        "extra_fields": [_extra(row, versions) for row, _, _, versions in kept],
    }
    if form.logprobs:
        values["rollout_log_probs"] = _jagged(
            (row.known_logprobs(_WITHOUT)[start:] for row, start, _, _ in kept), np.float32
        )
    return tensordict_utils.get_tensordict(values)


def _jagged(rows: Iterable[npt.NDArray[Any]], kind: type[np.generic]) -> torch.Tensor:
    """Returns a jagged tensor of one array, into which the rows are copied once."""
    listed = list(rows)
    offsets = np.zeros(len(listed) + 1, np.int64)
    np.cumsum([len(row) for row in listed], out=offsets[1:])
    values = np.concatenate(listed, dtype=kind, casting="unsafe")
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(offsets))


def _rewards(row: Trajectory, start: int, form: Form) -> npt.NDArray[np.float32]:
    """Returns rm_scores, (R,); verl's estimators carry a score back from the last trained token only."""
    score = row.score
    if score is None and (form.scored or not form.per_token):
        raise NoScore(
            f"{row.named} has no score, and "
            "verl's estimator or filter_groups needs one -> have the environment score its rows, or "
            "algorithm.adv_estimator=shmbridge algorithm.filter_groups.enable=False"
        )
    if form.per_token:
        return row.advantages[start:]
    rewards, trained = np.zeros(len(row.tokens) - start, np.float32), np.flatnonzero(row.trained[start:])
    rewards[trained[-1] if trained.size else -1] = score
    return rewards


def _turns(row: Trajectory) -> int:
    """Returns the answers of the policy: column `turn_ends`, or else runs of trained tokens."""
    if (ends := row.value("turn_ends")) is not None:
        return len(ends)
    return int(row.trained[0]) + int((row.trained[1:] & ~row.trained[:-1]).sum())


def _extra(row: Trajectory, versions: tuple[int, int]) -> dict[str, Any]:
    """Returns what verl carries beside the tensors; the origin names the record."""
    return {
        "min_global_steps": versions[0],
        "max_global_steps": versions[1],
        "reward_extra_info": dict(row.value("reward_components") or {})
        | ({} if row.score is None else {"score": row.score}),
        "origin": row.origin | {"finish_reason": row.finish_reason},
    }


@dataclass(frozen=True)
class GroupSummary:
    """Numbers of one group; advantages are those of trained tokens."""

    env_name: str
    scores: tuple[float, ...]
    rows: int
    advantage_sum: float
    trained_tokens: int
    empty_rows: int  # rows in which nothing is trained


def summary_of(rows: Sequence[Trajectory]) -> GroupSummary:
    """Returns the numbers of one group's rows, at least one. Never blocks."""
    return GroupSummary(
        env_name=rows[0].meta.env_name,
        scores=tuple(row.score for row in rows if row.score is not None),
        rows=len(rows),
        advantage_sum=float(sum(row.advantages[row.trained].sum(dtype=np.float64) for row in rows)),
        trained_tokens=sum(int(row.trained.sum()) for row in rows),
        empty_rows=sum(not row.trained.any() for row in rows),
    )


def atropos_metrics(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Returns metrics of the groups of a step; none for no groups. Never blocks."""
    if not groups:
        return {}
    rows = sum(group.rows for group in groups)
    scores = [score for group in groups for score in group.scores]
    alike = [group for group in groups if len(group.scores) > 1 and len(set(group.scores)) == 1]
    names = sorted({group.env_name for group in groups})
    metrics = {
        "atropos/batch_groups": len(groups),
        "atropos/total_sequences": rows,
        "atropos/num_environments": len(names),
        "atropos/identical_score_rate": len(alike) / len(groups),
        "atropos/avg_response_length": sum(group.trained_tokens for group in groups) / rows,
        "atropos/empty_response_count": sum(group.empty_rows for group in groups),
    }
    if scores:
        metrics["atropos/mean_score"] = float(np.mean(scores))
    for name in names:
        metrics[f"atropos/{name}/mean_advantage"] = _mean_advantage(g for g in groups if g.env_name == name)
    return metrics


def _mean_advantage(groups: Iterable[GroupSummary]) -> float:
    listed = list(groups)
    return sum(g.advantage_sum for g in listed) / max(sum(g.trained_tokens for g in listed), 1)


class PlaceholderPrompts(Dataset[dict[str, Any]]):
    """As many empty prompts as `data_files` says. Never blocks.

    Args:
        data_files: how many; verl passes `data.train_files` or `data.val_files` on.
        max_samples: at most so many; -1: no limit.
    """

    def __init__(self, data_files: Any, *_: Any, max_samples: int = -1, **__: Any) -> None:
        try:
            self._count = int(data_files)
        except (TypeError, ValueError):
            raise ValueError(
                f"data.train_files={data_files!r} names files, and a bridge's environments own the prompts "
                "-> write a number of placeholders there, such as train_batch_size x steps"
            ) from None
        if 0 <= max_samples < self._count:
            self._count = max_samples

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "raw_prompt": [],
            "index": index,
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # verl's batches need one tensor
        }
