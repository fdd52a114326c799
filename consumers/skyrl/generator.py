"""A SkyRL generator whose rollouts come from a bridge: per-token advantages as token-level rewards.

    generator = ShmGenerator(Feed("run1", groups=4, exact=True), repetitions=8)
    trainer = ShmTrainer(cfg=cfg, generator=generator, ...)

The hub is the process of SkyRL's trainer (the Ray task of its entrypoint): SkyRL's workers get tensors from
it. `entrypoint.BridgeSteps` tells the feed when a step is over. After a kill the groups in SkyRL's
own buffer come again, too: docs/how-to/skyrl.md.

The lists of a row are made at the last moment: SkyRL's interface has no arrays. Letters: L tokens of a row, R
of its response.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import get_rollout_metrics

from shmbridge.consumers.feed import Feed, Step, check_words
from shmbridge.consumers.skyrl.config import OWN, LongGroups, Match
from shmbridge.consumers.trajectories import Trajectory, columns_ignored

EVAL = "eval"


class NotEvaluated(RuntimeError):
    """SkyRL asks for an evaluation, and this generator was given none to do it."""


class NobodyAsks(RuntimeError):
    """Groups wait for prompts that the trainer does not ask for."""


@dataclass(slots=True)
class _Group:
    """One group, as SkyRL takes it."""

    step: Step  # of this group alone
    rows: list[Row]
    repetitions: list[int]
    is_last: list[bool]
    counts: Counter[str]


class ShmGenerator(GeneratorInterface):
    """Answers each prompt with a group of the bridge, for one event loop.

    Args:
        feed: gives exact steps, of as many groups as the trainer trains at once; it decides on staleness,
            advantages, rows that cannot be trained, and when groups are released. Stays open.
        repetitions: rows per prompt, SkyRL's `generator.n_samples_per_prompt`.
        step_wise: an episode may have several rows, SkyRL's `generator.step_wise_trajectories`.
        long_groups: what happens to a group of more than `repetitions` trajectories: "refuse" raises, "trim"
            leaves out the last ones and counts them.
        match: "arrival" gives the next prompt the next group; "instance" gives it the next group of the same
            instance (column `instance_id`, else the group's id), and keeps others until they are asked for.
        most_early: groups kept so, before it is an error.
        logprobs: "all" refuses rows without log-probabilities; "any" hands out none for a whole batch if one
            row has none.
        timeout_s: longest wait of `generate`; None: for ever.
        evaluator: answers the prompts of an evaluation; None: that is an error.
    """

    def __init__(
        self,
        feed: Feed,
        repetitions: int,
        *,
        step_wise: bool = False,
        long_groups: LongGroups = "refuse",
        match: Match = "arrival",
        most_early: int = 1024,
        logprobs: Literal["all", "any"] = "any",
        timeout_s: float | None = None,
        evaluator: GeneratorInterface | None = None,
    ) -> None:
        check_words({"match": match, "long_groups": long_groups}, **OWN)
        self.feed, self.repetitions, self.step_wise = feed, repetitions, step_wise
        self._long_groups, self._match, self._most_early = long_groups, match, most_early
        self._logprobs, self._evaluator, self._timeout_s = logprobs, evaluator, timeout_s
        self._held: dict[str, Step] = {}  # what the trainer has, by prompt
        self._early: dict[str, deque[_Group]] = {}
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
            NotEvaluated, NobodyAsks. ConsumerEmpty, Drained, BatchTooBig, UnfitRow: as `Feed.take`.
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
            groups = await self._take(len(prompts))
        else:
            groups = await self._of_instances(prompts)
        for prompt, group in zip(prompts, groups, strict=True):
            group.step.early = False
            if (before := self._held.pop(prompt, None)) is not None:  # asked for again, untrained
                self.feed.give_back(before)
            self._held[prompt] = group.step
        return self._output(prompts, groups)

    def trained(self, uids: Iterable[str]) -> None:
        """Tells the feed that a step on the groups of these prompts is over. Never blocks for records.

        Any thread. Prompts that hold nothing are ignored.
        """
        if steps := self._end(uids):
            self.feed.trained(steps)

    def failed(self, uids: Iterable[str], error: BaseException) -> None:
        """Tells the feed that a step on these groups failed; blocks and raises as it. Any thread."""
        if steps := self._end(uids):
            self.feed.failed(steps, error)

    def _end(self, uids: Iterable[str]) -> list[Step]:
        return [step for uid in uids if (step := self._held.pop(uid, None)) is not None]

    def staleness(self, uids: Iterable[str]) -> dict[str, float]:
        """Returns metrics on how many versions behind the held rows of these prompts are. Any thread."""
        behind = self._lags(step for uid in uids if (step := self._held.get(uid)) is not None)
        if not behind:
            return {}
        return {
            "shmbridge/rows_stale": float(sum(each > 0 for each in behind)),
            "shmbridge/staleness_trained_mean": sum(behind) / len(behind),
            "shmbridge/staleness_trained_max": float(max(behind)),
        }

    def _lags(self, steps: Iterable[Step]) -> list[int]:
        current = self.feed.consumer.training_version
        return [lag for step in steps for lag in step.lags(current)]

    @property
    def held(self) -> int:
        """Prompts whose groups are handed out and not trained."""
        return len(self._held)

    def stats(self) -> dict[str, float]:
        """Returns counters since the beginning, such as `rows_masked` and `columns_ignored{name}`, and
        `early_groups` now. Never blocks.
        """
        early = float(sum(map(len, self._early.values())))
        return {**{name: float(count) for name, count in self._totals.items()}, "early_groups": early}

    def close(self) -> None:
        """Gives back what is not trained: it comes to the next consumer. Leaves the feed open. Idempotent."""
        early = [group.step for groups in self._early.values() for group in groups]
        for step in (*self._held.values(), *early):
            self.feed.give_back(step)
        self._held.clear()
        self._early.clear()

    # -- groups

    async def _take(self, groups: int) -> list[_Group]:
        step = await self.feed.take_async(self._timeout_s, groups=groups)
        try:
            made = await asyncio.to_thread(self._groups_of, step)
        except BaseException:
            self.feed.give_back(step)
            raise
        for group, part in zip(made, self.feed.parts(step), strict=True):
            group.step = part
        return made

    async def _of_instances(self, prompts: list[str]) -> list[_Group]:
        found: list[_Group] = []
        try:
            for number, prompt in enumerate(prompts):
                found.append(await self._of_instance(prompt, prompts[number:]))
        except BaseException:
            for prompt, each in zip(prompts, found, strict=False):
                self._early.setdefault(prompt, deque()).appendleft(each)
            raise
        return found

    async def _of_instance(self, prompt: str, asked: list[str]) -> _Group:
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
                (group,) = await self._take(1)
                group.step.early = True
                self._early.setdefault(group.rows[0].metrics["instance_id"], deque()).append(group)
        found = self._early[prompt].popleft()
        if not self._early[prompt]:
            del self._early[prompt]
        return found

    def _groups_of(self, step: Step) -> list[_Group]:
        """Makes the lists; in a thread."""
        batch, rows = step.batch, step.rows
        of: list[list[Trajectory]] = [[] for _ in step.groups]
        for row in rows:
            of[batch.group_index[row.row]].append(row)
        made = [self._group(step, at, group) for at, group in enumerate(of)]
        ignored = columns_ignored(batch, READ)
        made[0].counts.update({f"columns_ignored{{{name}}}": count for name, count in ignored.items()})
        made[0].counts.update(
            {name: int(value) for name, value in step.metrics.items() if not name.endswith(("_mean", "_max"))}
        )
        return made

    def _group(self, step: Step, at: int, group: list[Trajectory]) -> _Group:
        like = group[0] if group else _no_row(step, at)
        meta = like.meta
        arranged = places(group, self.repetitions, step_wise=self.step_wise, long_groups=self._long_groups)
        rows = [masked_row(like) if each.trajectory is None else row_of(each.trajectory) for each in arranged]
        if self._logprobs == "all":
            for row in (each.trajectory for each in arranged if each.trajectory is not None):
                row.known_logprobs("trainer.algorithm.policy_loss_type=regular, which does without")
        counts: Counter[str] = Counter(
            groups=1,
            groups_redelivered=int(meta.redelivered),
            rows_masked=sum(each.trajectory is None for each in arranged),
            rows_trimmed=rows_left_out(group, arranged),
            rows_without_response=sum(row.prompt_length >= len(row.tokens) for row in group),
            rows_without_logprobs=sum(row.logprobs is None for row in rows),
        )
        return _Group(
            step, rows, [each.repetition for each in arranged], [each.is_last for each in arranged], counts
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
                **self._versions(groups),
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

    def _versions(self, groups: list[_Group]) -> dict[str, float]:
        """Metrics on versions; their names tell SkyRL how to put several groups together."""
        found = {"shmbridge/policy_version_max": float(self.feed.consumer.training_version)}
        if behind := self._lags(group.step for group in groups):
            found["shmbridge/staleness_mean"] = sum(behind) / len(behind)
            found["shmbridge/staleness_max"] = float(max(behind))
        return found


def _no_row(step: Step, at: int) -> Trajectory:
    """Returns a row without tokens, that says which group it is of: one of which no row can be trained."""
    batch, row = step.batch, int(np.searchsorted(step.batch.group_index, at))
    nothing = np.zeros(0, bool)
    return Trajectory(batch, row, 0, batch.tokens[:0], 0, nothing, np.zeros(0, np.float32), None, False)


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


class GroupDoesNotFit(ValueError):
    """A group's rows do not fit SkyRL's `n_samples_per_prompt`; nothing was taken, the group comes again."""


@dataclass(frozen=True, slots=True)
class Place:
    """What goes into one row of a prompt: a row of the group or nothing; whether an episode ends there."""

    trajectory: Trajectory | None
    repetition: int
    is_last: bool = True


def places(
    group: list[Trajectory], repetitions: int, *, step_wise: bool = False, long_groups: LongGroups = "refuse"
) -> list[Place]:
    """Returns what each row of one prompt is, repetition by repetition. Never blocks.

    Rows are ordered by column `repetition_id`, and within one episode by `row_index`; without these columns
    they stay in the order of the group. With `step_wise`, an episode may have several rows.

    Args:
        group: the rows of one group, also none.
        repetitions: SkyRL's `generator.n_samples_per_prompt`.
        step_wise: SkyRL's `generator.step_wise_trajectories`.
        long_groups: "trim" leaves out the episodes after the first `repetitions`.

    Raises:
        GroupDoesNotFit: more episodes than `repetitions`, and they are not to be trimmed; or an episode of
            several rows without `step_wise`.
    """
    episodes = _episodes(group)
    several = next((rows for rows in episodes if len(rows) > 1), None)
    if several is not None and not step_wise:
        meta = group[0].meta
        raise GroupDoesNotFit(
            f"group {meta.group_id} of environment {meta.env_name!r} has an episode of {len(several)} rows "
            "-> generator.step_wise_trajectories=true"
        )
    if len(episodes) > repetitions and long_groups == "refuse":
        meta = group[0].meta
        raise GroupDoesNotFit(
            f"group {meta.group_id} of environment {meta.env_name!r} has {len(episodes)} trajectories, "
            f"n_samples_per_prompt is {repetitions} -> generator.n_samples_per_prompt={len(episodes)}, or "
            "bridge.long_groups=trim"
        )
    found = [
        Place(row, number, row is rows[-1])
        for number, rows in enumerate(episodes[:repetitions])
        for row in rows
    ]
    return found + [Place(None, number) for number in range(len(episodes), repetitions)]


def rows_left_out(group: list[Trajectory], arranged: list[Place]) -> int:
    """Returns the rows of the group that have no place. Never blocks."""
    return len(group) - sum(place.trajectory is not None for place in arranged)


def _episodes(group: list[Trajectory]) -> list[list[Trajectory]]:
    """Returns the rows by episode: by `repetition_id` where all have one, else split after `is_last`."""
    numbers = [row.value("repetition_id") for row in group]
    if any(number is None for number in numbers):
        return _split(group)
    by_number: dict[int, list[Trajectory]] = {}
    for number, row in zip(numbers, group, strict=True):
        by_number.setdefault(int(number), []).append(row)
    return [sorted(by_number[number], key=_index) for number in sorted(by_number)]


def _split(group: list[Trajectory]) -> list[list[Trajectory]]:
    episodes: list[list[Trajectory]] = [[]]
    for row in group:
        episodes[-1].append(row)
        ends = row.value("is_last")
        if ends is None or ends:
            episodes.append([])
    return [rows for rows in episodes if rows]


def _index(row: Trajectory) -> int:
    return 0 if (there := row.value("row_index")) is None else int(there)


# Columns that a row's `env_metrics` carries as they are, in arrays over the whole row.
CARRIED = (
    "step_rewards", "step_ends", "trace_spans", "turn_ends", "token_versions", "token_rewards",
    "reward_components", "raw_score", "messages", "extra",
)  # fmt: skip
# Columns that have a place of their own in what SkyRL gets.
READ = frozenset(
    (
        "tokens", "prompt_length", "loss_mask", "masks", "score", "advantages", "advantages_mask",
        "inference_logprobs", "finish_reason", "instance_id", "repetition_id", "row_index", "is_last",
        *CARRIED,
    )
)  # fmt: skip
UNKNOWN_END = "unknown"  # why a row ended, if nobody said


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of each list in a GeneratorOutput."""

    prompt: list[int]  # at least one token
    response: list[int]  # (R,) at least one token
    rewards: list[float]  # (R,) advantages, 0 where nothing is trained
    loss_mask: list[int]  # (R,) 1 = trained
    logprobs: list[float] | None  # (R,) nats, 0 where nothing is trained; None: not all recorded
    stop_reason: str
    metrics: dict[str, Any]


def row_of(trajectory: Trajectory) -> Row:
    """Returns a row of a bridge as SkyRL takes it: copies of its numbers, views in `metrics`. Never blocks.

    SkyRL needs a token before the response and one in it. So the response of a row of a prompt only is its
    last token, untrained, and a row's first token is in its prompt.
    """
    size = len(trajectory.tokens)
    if size < 2:
        return masked_row(trajectory)
    begin = max(1, min(trajectory.prompt_length, size - 1))
    tokens = trajectory.tokens
    return Row(
        prompt=tokens[:begin].tolist(),
        response=tokens[begin:].tolist(),
        rewards=trajectory.advantages[begin:].tolist(),
        loss_mask=trajectory.trained[begin:].astype("int64").tolist(),
        logprobs=None if trajectory.logprobs is None else trajectory.logprobs[begin:].tolist(),
        stop_reason=trajectory.finish_reason or UNKNOWN_END,
        metrics=_metrics(trajectory),
    )


def masked_row(like: Trajectory) -> Row:
    """Returns two tokens of which nothing is trained, for a place that no row of the group fills.

    `like` may have no tokens.
    """
    first = int(like.tokens[0]) if len(like.tokens) else 0
    metrics = _identity(like) | {"masked": True}
    return Row([first], [first], [0.0], [0], [0.0], "abort", metrics)


def _metrics(trajectory: Trajectory) -> dict[str, Any]:
    carried = {name: trajectory.value(name) for name in CARRIED}
    return {
        **_identity(trajectory),
        "score": trajectory.score,
        "own_advantages": trajectory.own_advantages,
        **{name: value for name, value in carried.items() if value is not None},
    }


def _identity(trajectory: Trajectory) -> dict[str, Any]:
    meta, names = trajectory.meta, ("min_policy_version", "max_policy_version", "redelivered")
    return trajectory.origin | {name: getattr(meta, name) for name in names}
