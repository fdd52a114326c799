"""A SkyRL generator whose rollouts come from a bridge: per-token advantages as token-level rewards.

    generator = ShmGenerator(consumer, repetitions=8)
    trainer = ShmTrainer(cfg=cfg, generator=generator, ...)

**Hub**: the process of SkyRL's trainer (the Ray task of its entrypoint). SkyRL's workers get tensors from it,
not from the bridge.

**Released**: when `RayPPOTrainer.train_critic_and_policy` returns, so after the optimizer steps of the batch
that the group is in; `trainer.py` calls `ShmGenerator.trained`. Under the simulated trainer: when
`_run_training` returns. A checkpoint is no condition.

**Again after a kill**: every group that `generate` has returned and whose step had not ended, marked
`redelivered`, and every group not yet taken. Under fully asynchronous training that includes the groups in
SkyRL's own buffer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import get_rollout_metrics

import shmbridge
from shmbridge import Batch
from shmbridge.config import check_choice
from shmbridge.consumers.skyrl.arrange import LongGroups, places, rows_left_out
from shmbridge.consumers.skyrl.config import LONG_GROUPS, MATCHES, Match
from shmbridge.consumers.skyrl.rows import READ, Row, masked_row, row_of
from shmbridge.consumers.skyrl.take import GroupTaker, HeldGroups, abandon
from shmbridge.consumers.trajectories import Credit, Trajectory, columns_ignored, trajectories

EVAL = "eval"


class NotEvaluated(RuntimeError):
    """SkyRL asks for an evaluation, and this generator was given none to do it."""


class NoLogprobs(ValueError):
    """A loss needs the sampler's log-probabilities, and a row has none; nothing was taken."""


class NobodyAsks(RuntimeError):
    """Groups wait for prompts that the trainer does not ask for."""


@dataclass(frozen=True, slots=True)
class _Group:
    """One group, as SkyRL takes it."""

    rows: list[Row]
    repetitions: list[int]
    is_last: list[bool]
    counts: Counter[str]


class ShmGenerator(GeneratorInterface):
    """Answers each prompt with a group of the bridge, for one event loop.

    Eval groups of the bridge are released untrained, and counted in `left_out_total{eval}`.

    Args:
        consumer: the hub; nobody else takes from it. Stays open.
        repetitions: rows per prompt, SkyRL's `generator.n_samples_per_prompt`.
        step_wise: an episode may have several rows, SkyRL's `generator.step_wise_trajectories`.
        long_groups: what happens to a group of more than `repetitions` trajectories: "refuse" raises, "trim"
            leaves out the last ones and counts them.
        match: "arrival" gives the next prompt the next group; "instance" gives it the next group of the same
            instance (column `instance_id`, else the group's id), and keeps others until they are asked for.
        most_early: groups kept so, before it is an error.
        max_staleness: groups more policy versions behind are discarded and counted; None: none.
        logprobs: "all" refuses rows without log-probabilities; "any" hands out none for a whole batch if one
            row has none.
        credit: how advantages are made where a group has none of its own.
        mask_truncated: rows that ended for another reason than "stop" train nothing, SkyRL's
            `generator.apply_overlong_filtering`.
        timeout_s: longest wait of `generate`; None: for ever.
        prompts_per_step: prompts that the trainer must have before it trains and releases any; None: not
            known. With fewer handed out, lanes that are full are an error (BatchTooBig), and no wait.
        evaluator: answers the prompts of an evaluation; None: that is an error.
    """

    def __init__(
        self,
        consumer: shmbridge.Consumer,
        repetitions: int,
        *,
        step_wise: bool = False,
        long_groups: LongGroups = "refuse",
        match: Match = "arrival",
        most_early: int = 1024,
        max_staleness: int | None = None,
        logprobs: Literal["all", "any"] = "any",
        credit: Credit | None = None,
        mask_truncated: bool = False,
        timeout_s: float | None = None,
        prompts_per_step: int | None = None,
        evaluator: GeneratorInterface | None = None,
    ) -> None:
        check_choice("match", match, MATCHES)
        check_choice("long_groups", long_groups, LONG_GROUPS)
        self.consumer, self.repetitions, self.step_wise = consumer, repetitions, step_wise
        self._long_groups, self._match, self._most_early = long_groups, match, most_early
        self._logprobs, self._credit, self._evaluator = logprobs, credit or Credit(), evaluator
        self._mask_truncated = mask_truncated
        self._held, self._per_step = HeldGroups(), prompts_per_step or 1
        self._taker = GroupTaker(
            consumer, max_staleness=max_staleness, timeout_s=timeout_s, is_to_release=self._is_to_release
        )
        self._early: dict[str, deque[tuple[Batch, _Group]]] = {}
        self._one_takes = asyncio.Lock()
        self._totals: Counter[str] = Counter()

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Returns the rollouts of a batch of prompts, in its order. Never blocks the event loop.

        Each run of rows of one `instance_id` in the input gets one group.

        Returns:
            Lists with an entry per input row, or per step under `step_wise`: `rewards` are advantages, one
            per response token, dimensionless; `rollout_logprobs` are nats; `env_metrics` say for each row
            which record it came from, its policy versions, and carry its other columns. `rollout_metrics`
            count what was padded, left out and not used. All are the caller's own.

        Raises:
            GroupDoesNotFit, NoLogprobs, NoAdvantages: the groups come again, unread.
            NotEvaluated, NobodyAsks. ConsumerEmpty, RolloutsOver, BatchTooBig: as `GroupTaker.take`.
        """
        metadata = input_batch.get("batch_metadata")
        if metadata is not None and metadata.training_phase == EVAL:
            if self._evaluator is None:
                raise NotEvaluated(
                    "SkyRL evaluates, and a bridge carries training groups -> trainer.eval_interval=-1, or "
                    "ShmGenerator(evaluator=) with a generator of SkyRL's own"
                )
            return await self._evaluator.generate(input_batch)
        prompts = _prompts(input_batch, self.repetitions)
        if self._match == "arrival":
            batch, groups = await self._taker.take(len(prompts), self._groups_of)
            self._held.hold(prompts, batch)
        else:
            groups = await self._of_instances(prompts)
        return self._output(prompts, groups)

    def trained(self, uids: Iterable[str]) -> int:
        """Releases the groups of these prompts: their optimizer steps are over. Counts a step.

        Never blocks for long; any thread. Prompts that hold nothing are ignored.

        Returns:
            Batches released.
        """
        self.consumer.queue.count_batch()
        return self._held.release(uids)

    def staleness(self, uids: Iterable[str]) -> dict[str, float]:
        """Returns metrics on how many versions behind the held rows of these prompts are. Any thread."""
        behind = self._held.staleness(uids, self.consumer.training_version)
        if not behind:
            return {}
        return {
            "shmbridge/rows_stale": float(sum(each > 0 for each in behind)),
            "shmbridge/staleness_trained_mean": sum(behind) / len(behind),
            "shmbridge/staleness_trained_max": float(max(behind)),
        }

    @property
    def held(self) -> int:
        """Prompts whose groups are handed out and not trained."""
        return len(self._held)

    def stats(self) -> dict[str, float]:
        """Returns counters since the beginning, such as `rows_masked` and `columns_ignored{name}`, and
        `early_groups` now. Never blocks.
        """
        early = sum(map(len, self._early.values()))
        eval_groups = self.consumer.stats()["left_out_total{eval}"]
        now = {"left_out_total{eval}": eval_groups, "early_groups": float(early)}
        return {name: float(count) for name, count in self._totals.items()} | now

    def close(self) -> None:
        """Ends the calls under way; releases nothing: the next consumer gets what is held.

        Leaves the consumer open. Blocks until the taker's thread has ended. Idempotent.
        """
        self._taker.close()
        self._held.abandon()
        for waiting in self._early.values():
            for batch, _ in waiting:
                abandon(batch)
        self._early.clear()

    # -- groups

    def _is_to_release(self) -> tuple[bool, str]:
        held = len(self._held)
        return (
            held >= self._per_step,
            f"SkyRL has {held} of the {self._per_step} groups that it trains at once",
        )

    async def _of_instances(self, prompts: list[str]) -> list[_Group]:
        found: list[tuple[Batch, _Group]] = []
        try:
            for number, prompt in enumerate(prompts):
                found.append(await self._of_instance(prompt, prompts[number:]))
        except BaseException:
            for prompt, each in zip(prompts, found, strict=False):
                self._early.setdefault(prompt, deque()).appendleft(each)
            raise
        for prompt, (batch, _) in zip(prompts, found, strict=True):
            self._held.hold([prompt], batch)
        return [group for _, group in found]

    async def _of_instance(self, prompt: str, asked: list[str]) -> tuple[Batch, _Group]:
        while not self._early.get(prompt):
            async with self._one_takes:
                if self._early.get(prompt):
                    break
                if sum(map(len, self._early.values())) >= self._most_early:
                    first = ", ".join(list(self._early)[:4])
                    raise NobodyAsks(
                        f"{self._most_early} groups wait for instances that nobody asked for ({first}), the "
                        f"trainer asks for {', '.join(asked[:4])} -> give trainer and environments the same "
                        "data set, or bridge.match=arrival"
                    )
                batch, (group,) = await self._taker.take(1, self._groups_of)
                instance = group.rows[0].metrics["instance_id"]
                self._early.setdefault(instance, deque()).append((batch, group))
        found = self._early[prompt].popleft()
        if not self._early[prompt]:
            del self._early[prompt]
        return found

    def _groups_of(self, batch: Batch) -> list[_Group]:
        """Makes the lists; in the taker's thread."""
        rows, credit_metrics = trajectories(batch, self._credit, mask_truncated=self._mask_truncated)
        made = [
            self._group(list(each)) for _, each in groupby(rows, key=lambda row: batch.group_index[row.row])
        ]
        ignored = columns_ignored(batch, READ)
        made[0].counts.update({f"columns_ignored{{{name}}}": count for name, count in ignored.items()})
        made[0].counts.update(
            {name: int(value) for name, value in credit_metrics.items() if not name.endswith("_mean")}
        )
        return made

    def _group(self, group: list[Trajectory]) -> _Group:
        arranged = places(group, self.repetitions, step_wise=self.step_wise, long_groups=self._long_groups)
        rows = [
            masked_row(group[0]) if each.trajectory is None else row_of(each.trajectory) for each in arranged
        ]
        without = sum(row.logprobs is None for row in rows)
        if without and self._logprobs == "all":
            meta = group[0].meta
            raise NoLogprobs(
                f"group {meta.group_id} of environment {meta.env_name!r} has {without} of {len(rows)} rows "
                "without inference_logprobs, and this loss compares with the sampler -> have the environment "
                "record them, or choose a loss that does not: trainer.algorithm.policy_loss_type=regular"
            )
        meta = group[0].meta
        counts: Counter[str] = Counter(
            groups=1,
            groups_redelivered=int(meta.redelivered),
            rows_masked=sum(each.trajectory is None for each in arranged),
            rows_trimmed=rows_left_out(group, arranged),
            rows_without_response=sum(row.prompt_length >= len(row.tokens) for row in group),
            rows_without_logprobs=without,
        )
        return _Group(
            rows, [each.repetition for each in arranged], [each.is_last for each in arranged], counts
        )

    # -- what SkyRL gets

    def _output(self, prompts: list[str], groups: list[_Group]) -> GeneratorOutput:
        rows = [row for group in groups for row in group.rows]
        responses, rewards = [row.response for row in rows], [row.rewards for row in rows]
        masks, logprobs = [row.loss_mask for row in rows], [row.logprobs for row in rows]
        counts: Counter[str] = Counter()
        for group in groups:
            counts.update(group.counts)
        self._totals.update(counts)
        ids = [
            TrajectoryID(prompt, repetition)
            for prompt, group in zip(prompts, groups, strict=True)
            for repetition in group.repetitions
        ]
        return {
            "prompt_token_ids": [row.prompt for row in rows],
            "response_ids": responses,
            "rewards": rewards,
            "loss_masks": masks,
            "stop_reasons": [row.stop_reason for row in rows],
            "rollout_metrics": {
                **get_rollout_metrics(responses, rewards, loss_masks=masks),
                **{f"shmbridge/{name}": count for name, count in counts.items()},
                **self._versions(rows),
                **_scores(groups),
            },
            "rollout_logprobs": None if None in logprobs else logprobs,
            "trajectory_ids": ids,
            "trajectory_generation_times": None,
            "rollout_expert_indices": None,
            "is_last_step": [last for group in groups for last in group.is_last] if self.step_wise else None,
            "env_metrics": [row.metrics for row in rows],
            "pixel_values": None,
            "image_grid_thw": None,
        }

    def _versions(self, rows: list[Row]) -> dict[str, float]:
        """Metrics on versions; their names tell SkyRL how to put several groups together."""
        current = self.consumer.training_version
        stamped = [version for row in rows if (version := row.metrics["min_policy_version"]) >= 0]
        found = {"shmbridge/policy_version_max": float(current)}
        if stamped and current >= 0:
            behind = [max(0, current - version) for version in stamped]
            found["shmbridge/staleness_mean"] = sum(behind) / len(behind)
            found["shmbridge/staleness_max"] = float(max(behind))
        return found


def _scores(groups: list[_Group]) -> dict[str, float]:
    """Returns the mean score of each environment's rows and of all; none where no row has one.

    SkyRL puts several groups together by the mean of their means, as the names ask for.
    """
    of: dict[str, list[float]] = {}
    for row in (row.metrics for group in groups for row in group.rows):
        if row.get("score") is not None:
            of.setdefault(row["env_name"], []).append(row["score"])
    if not of:
        return {}
    every = [score for scores in of.values() for score in scores]
    means = {f"shmbridge/score_mean/{name}": sum(scores) / len(scores) for name, scores in of.items()}
    return {"shmbridge/score_mean": sum(every) / len(every), **means}


def _prompts(input_batch: GeneratorInput, repetitions: int) -> list[str]:
    """Returns the instance of each prompt, in the order of the input."""
    ids = input_batch.get("trajectory_ids")
    if ids is None:
        raise ValueError(
            "GeneratorInput has no trajectory_ids -> make it with SkyRL's prepare_generator_input"
        )
    rows = {uid: len(list(each)) for uid, each in groupby(each.instance_id for each in ids)}
    wrong = next(((uid, count) for uid, count in rows.items() if count != repetitions), None)
    if wrong is not None or sum(rows.values()) != len(ids):
        uid, count = wrong or ("?", len(ids))
        raise ValueError(
            f"prompt {uid!r} has {count} rows in the input, this generator answers with {repetitions} -> "
            "ShmGenerator(repetitions=) is generator.n_samples_per_prompt"
        )
    return list(rows)
