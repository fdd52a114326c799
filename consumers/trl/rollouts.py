"""Groups of a bridge in place of TRL's own generation: what `rollout_func` of `GRPOTrainer` is given.

    rollouts = shm_rollout_func("run1", max_staleness=2)
    ShmGRPOTrainer("model", args=GRPOConfig(max_steps=100, ...), rollout_func=rollouts).train()

The environments own the prompts: what TRL passes is ignored but for its number. `grpo.py` says when records
are released. Imports no TRL. Letters: B rows, L tokens of one row, T tokens of the longest completion.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from msgspec import structs

import shmbridge
from shmbridge import Batch
from shmbridge.config import check_bridge_name
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.feed import (
    Drained,
    Feed,
    ReleaseAt,
    Start,
    Step,
    Unfit,
    blames_groups,
    check_words,
    warn_of_stale_rows,
)
from shmbridge.consumers.trajectories import (
    Credit,
    Trajectory,
    columns_ignored,
    lags,
    trajectories,
    unfit_row,
    unfit_rows,
)
from shmbridge.record import Group, abandon

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

# read here, or by the credit assignment
READ = frozenset((
    "tokens", "loss_mask", "masks", "prompt_length", "advantages", "advantages_mask", "overrides",
    "inference_logprobs", "generation_params", "group_overrides", "temperature",
))  # fmt: skip
# arguments of reward functions that TRL fills itself
_TAKEN = frozenset((
    "prompt", "prompts", "completion", "completions", "completion_ids", "environment", "environments",
    "trainer_state", "log_extra", "log_metric", "env_mask", "prompt_ids", "logprobs", "image", "images",
))  # fmt: skip


class UnevenGroups(ValueError):
    """A batch from the bridge does not have as many rows as the trainer wants; it comes again."""


@dataclass(frozen=True)
class Row:
    """One row, cut in two; the arrays are views, value i belongs to token i."""

    prompt: Integers  # at least one token
    completion: Integers  # at least one token
    trained: Integers  # as long as the completion, 0 or 1
    advantages: Floats  # as long as the completion
    logprobs: Floats | None  # as long as the completion; None: the sampler recorded none
    masked: bool  # nothing in it is trained


@dataclass(frozen=True)
class Rows:
    """The rows of one generation batch of one process."""

    rows: list[Row]
    columns: dict[str, list[Any]]  # columns that nothing here reads: for reward functions; None where absent
    ignored: dict[str, int]  # column -> rows that have it, of columns whose name TRL gives to something else
    counts: dict[str, float] = field(default_factory=dict)

    def padded(self, name: str, width: int) -> Floats:
        """Returns float32 (B, width) of "advantages" or "logprobs", 0 where a row has none. Never blocks.

        A new array; padded on the right, as TRL pads completions.
        """
        made = np.zeros((len(self.rows), width), np.float32)
        for to, row in zip(made, self.rows, strict=True):
            if (values := getattr(row, name)) is not None:
                to[: len(values)] = values
        return made

    @property
    def unscored(self) -> npt.NDArray[np.bool_]:
        """Bool (B,): rows with trained tokens, and without log-probabilities of the sampler."""
        return np.array([row.logprobs is None and not row.masked for row in self.rows], np.bool_)

    @property
    def scored(self) -> npt.NDArray[np.bool_]:
        """Bool (B,): rows with trained tokens, and their log-probabilities of the sampler."""
        return np.array([row.logprobs is not None and not row.masked for row in self.rows], np.bool_)


def rows_of(
    batch: Batch,
    want: int,
    *,
    pad_id: int,
    credit: Credit,
    temperature: float = 1.0,
    fill: bool = False,
    whole_rows: bool = False,
    mask_truncated: bool = False,
    unfit: Container[int] = (),
) -> Rows:
    """Returns the rows of a packed batch. Never blocks, releases nothing.

    The completion begins where the response does. Where a row has no response, or no prompt, the cut moves by
    one token, because TRL takes neither an empty completion nor a batch of empty prompts; masks stay as they
    are. Rows of fewer than two tokens, which can train nothing, become rows of two masked padding tokens, and
    so do unfit rows.

    Args:
        batch: a packed batch.
        want: rows that the trainer wants.
        pad_id: the tokenizer's padding token.
        credit: how advantages are computed where a record has none.
        temperature: the trainer's; rows sampled at another one are counted.
        fill: adds fully masked rows where the batch has fewer.
        whole_rows, mask_truncated: as in `trajectories`.
        unfit: rows that cannot be trained, by their numbers in the batch.

    Raises:
        UnevenGroups: more rows than wanted, or fewer without `fill`.
        NoAdvantages: as in `trajectories`.
    """
    found, metrics = trajectories(batch, credit, whole_rows=whole_rows, mask_truncated=mask_truncated)
    missing = want - len(found)
    if missing < 0 or (missing and not fill):
        raise UnevenGroups(_uneven(batch, want))
    wide = batch.tokens.astype(np.int64)
    starts = batch.cu_seqlens
    rows = [
        _row(each, wide[starts[each.row] : starts[each.row + 1]])
        if len(each.tokens) > 1 and each.row not in unfit
        else _masked_row(pad_id)
        for each in found
    ]
    unused = columns_ignored(batch, READ)
    columns: dict[str, list[Any]] = {
        name: [each.value(name) for each in found] + [None] * missing for name in unused if name not in _TAKEN
    }
    facts = BatchFacts(batch, temperature)
    other = ~np.isclose(facts.temperatures, temperature) | facts.odd_temperature
    counts = {
        "rows": float(len(found)),
        "tokens": float(batch.token_count),
        "rows_filled": float(missing),
        "rows_left_out": float(sum(each.row in unfit for each in found)),
        "rows_too_short": float(sum(len(each.tokens) < 2 for each in found)),
        "rows_untrained": float(sum(not each.trained.any() for each in found)),
        "rows_without_logprobs": float(sum(each.logprobs is None and each.trained.any() for each in found)),
        "rows_other_temperature": float(other.sum()),
        "rows_cut_sampling": float(facts.cut_sampling.sum()),
        "rows_truncated": metrics.get("trajectories_truncated", 0.0),
        "rows_without_finish_reason": metrics.get("trajectories_without_finish_reason", 0.0),
        "groups_fallback": metrics["groups_fallback"],
        "rows_no_signal": metrics["trajectories_no_signal"],
    }
    rows += [_masked_row(pad_id)] * missing
    ignored = {name: count for name, count in unused.items() if name in _TAKEN}
    return Rows(rows, columns, ignored, counts)


def _row(each: Trajectory, tokens: Integers) -> Row:
    cut = min(max(each.prompt_length, 1), len(tokens) - 1)
    logprobs = None if each.logprobs is None else each.logprobs[cut:]
    trained = each.trained[cut:].astype(np.int64)
    return Row(tokens[:cut], tokens[cut:], trained, each.advantages[cut:], logprobs, not trained.any())


def _masked_row(pad_id: int) -> Row:
    token, nothing = np.array([pad_id]), np.zeros(1, np.float32)
    return Row(token, token, np.zeros(1, np.int64), nothing, nothing, True)


def _uneven(batch: Batch, want: int) -> str:
    sizes = np.bincount(batch.group_index)
    odd = int(np.abs(sizes - want / len(sizes)).argmax())
    meta = batch.meta[int((batch.group_index == odd).argmax())]
    return (
        f"a batch of {len(sizes)} groups has {len(batch)} rows and the trainer wants {want}; group "
        f"{meta.group_id!r} of environment {meta.env_name!r} has {sizes[odd]} -> groups of num_generations "
        'rows, or uneven="fill" (too few rows) or uneven="skip" of shm_rollout_func'
    )


Uneven = Literal["refuse", "fill", "skip"]

ALL = (1 << 31) - 1
_DEFAULT = Credit()
_ODD_SAMPLING = ("rows_other_temperature", "rows_cut_sampling")


class NotJoined(TypeError):
    """The rollouts were given to a trainer that would not use their advantages, nor release their records."""


class ShmRollouts:
    """The generation batches of one trainer process, and their leases; `shm_rollout_func` is this class.

    A context manager, for the trainer's thread. Making one does not block: the trainer opens the bridge.

    Args:
        bridge: its name.
        max_staleness: groups that are more versions behind the policy when their batch is handed out are
            discarded and counted; None: no limit.
        uneven: what to do where groups do not have `num_generations` rows: "refuse" (UnevenGroups), "fill"
            (fully masked rows in place of missing ones, counted; too many rows are still refused) or "skip"
            (such groups are released untrained, and counted in `screened_total`).
        credit: how advantages are computed for groups without their own; `Credit(fallback=False)` refuses
            these.
        prefetch: batches gathered ahead, still held.
        timeout_s: seconds that a generation waits for a batch, then ConsumerEmpty; None: for ever, with a
            warning for each minute.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole; otherwise not at all.
        release_at, set_aside_after, start: as of `Feed`.
        unfit: rows with a token that the model does not know, or longer than `longest_row`: "refuse" raises
            UnfitRow, "leave_out" masks and counts them.
        longest_row: most tokens of a row; None: the positions of the model.
        consumer: further options of shmbridge.Consumer: run, lanes, schema, policy, ...

    Raises:
        ValueError: an argument is not one of the allowed values. TypeError: Consumer has no such option.
    """

    def __init__(
        self,
        bridge: str,
        *,
        max_staleness: int | None = None,
        uneven: Uneven = "refuse",
        credit: Credit = _DEFAULT,
        prefetch: int = 1,
        timeout_s: float | None = None,
        whole_rows: bool = False,
        release_at: ReleaseAt | None = None,
        set_aside_after: int = 2,
        unfit: Unfit = "refuse",
        longest_row: int | None = None,
        start: Start | None = None,
        **consumer: Any,
    ) -> None:
        check_words(locals(), uneven=get_args(Uneven))
        check_options(bridge, credit, consumer)
        self.bridge, self.uneven, self._credit = bridge, uneven, credit
        self._timeout_s, self._whole_rows, self._unfit = timeout_s, whole_rows, unfit
        self._longest_row, self._vocabulary = longest_row, None
        self._options: dict[str, Any] = {  # of the feed
            "max_staleness": max_staleness, "prefetch": prefetch, "release_at": release_at, "unfit": unfit,
            "set_aside_after": set_aside_after, "start": start, **consumer,
        }  # fmt: skip
        self._trainer: Any = None
        self.feed: Feed | None = None  # in the hub's process
        self._rank: shmbridge.Rank | None = None  # if there are several processes
        # micro-steps after which nobody needs it; the step, in the hub's process; this one's rows of it
        self._held: deque[tuple[int, Step | None, Batch]] = deque()
        self._steps = 0
        self._has_begun = False  # whether the run is announced
        self._counts: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._fresh: dict[str, float] = {}
        self.latest: Rows | None = None  # of the last call
        self.closed = False

    # -- opening

    def join(self, trainer: Any, *, rank: int, world_size: int, groups: int) -> None:
        """Opens the bridge for a trainer's process; rank 0 is the consumer, and deals out the shares.

        Does not wait for other processes. `groups` are those in a generation batch of one process. Raises
        ConsumerTaken, RankTaken: the place is taken. ValueError: it has a trainer, and answers no other.
        """
        if self._trainer is not None:
            raise ValueError(f"the rollouts of bridge {self.bridge!r} have a trainer already -> make others")
        self._vocabulary = getattr(trainer.model.get_input_embeddings(), "num_embeddings", None)
        if self._longest_row is None:
            config = trainer.model.config.get_text_config()
            self._longest_row = getattr(config, "max_position_embeddings", None)
        self._groups, self._world_size = groups, world_size
        if rank == 0:
            self.feed = self._open(trainer)
        if world_size > 1:
            self._rank = shmbridge.Rank(self.bridge, rank, world_size)
            if self.feed is None and self._options["set_aside_after"]:
                self._rank.note_crashes(Path(trainer.args.output_dir) / "set_aside")
        self._trainer = trainer

    def _open(self, trainer: Any) -> Feed:
        args, options, groups = trainer.args, dict(self._options), self._groups * self._world_size
        every = {"no": -1, "steps": max(int(args.save_steps), 1)}.get(args.save_strategy, ALL)  # not in steps
        rows = groups * trainer.num_generations
        run = options.pop("run", None) or shmbridge.Run(batch_size=rows, max_token_len=0, num_steps=ALL)
        feed = Feed(
            self.bridge,
            groups=groups,
            exact=True,
            trained_together=ALL,  # what the trainer has when it asks stays until it has got more
            longest_row=self._longest_row,
            vocabulary=self._vocabulary,
            screen=(lambda group: group.rows == trainer.num_generations) if self.uneven == "skip" else None,
            run=structs.replace(run, save_checkpoint_interval=every),
            run_dir=args.output_dir,
            **options,
        )
        if self._world_size > 1:
            feed.serve_ranks(self._world_size)
        return feed

    # -- what the trainer calls

    def _take(self) -> tuple[Step | None, Batch, dict[int, tuple[str, str]]]:
        """Returns the step in the hub's process, and the rows here with those that cannot be trained."""
        step = None if self.feed is None else self.feed.take(self._timeout_s)
        if self._rank is None:
            assert step is not None
            return step, step.batch, step.unfit
        share = self._rank.next_share(self._timeout_s)
        batch = None if share is None else self._rank.gather(share)
        if batch is None:
            raise Drained(
                f"bridge {self.bridge!r} is drained and has no further batch of {self._groups} groups per "
                "process -> save the model; a new run needs a bridge that is not drained"
            )
        if (unfit := unfit_rows(batch, self._longest_row, self._vocabulary)) and self._unfit == "refuse":
            row, why = next(iter(unfit.items()))
            self._rank.report_failed([batch.groups[int(batch.group_index[row])]])
            raise unfit_row(batch, row, why)
        return step, batch, unfit

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Returns the next generation batch as TRL's `rollout_func` must, with a row for each prompt.

        Blocks until there is one. Token ids and masks are int64 arrays; other columns are values for reward
        functions, one per row. The records stay leased. Raises UnevenGroups, UnfitRow, NoAdvantages: of the
        batch, which comes again. Drained. ConsumerEmpty. NotJoined: another trainer calls, or an evaluation.
        """
        if trainer is not self._trainer:
            raise NotJoined(
                f"{type(trainer).__name__} would use neither advantages per token nor release records -> "
                "ShmGRPOTrainer"
            )
        if not trainer.model.training:
            raise NotJoined("evaluation asks for rollouts of its own prompts -> eval_strategy='no'")
        taken = None
        try:
            step, batch, unfit = taken = self._take()
            rows = rows_of(
                batch,
                len(prompts),
                pad_id=getattr(trainer.processing_class, "tokenizer", trainer.processing_class).pad_token_id,
                credit=self._credit,
                temperature=trainer.temperature,
                fill=self.uneven == "fill",
                whole_rows=self._whole_rows,
                mask_truncated=trainer.args.mask_truncated_completions,
                unfit=unfit,
            )
        except BaseException as error:
            self.give_back()  # what the optimizer step has besides is not at fault
            if taken is not None:
                self._held.append((0, *taken[:2]))
                self.failed(error, taken[1].groups)
            raise
        every = trainer.args.steps_per_generation * trainer.num_iterations
        self._held.append((self._steps + every, step, batch))
        self._count(batch, rows)
        self.latest = rows
        return {
            "prompt_ids": [row.prompt for row in rows.rows],
            "completion_ids": [row.completion for row in rows.rows],
            "env_mask": [row.trained for row in rows.rows],
            "logprobs": None,  # ShmGRPOTrainer sets them as an array; TRL would go through a list
            **rows.columns,
        }

    def micro_step_done(self) -> None:
        """Counts a forward and backward pass over one part of a generation batch. Never blocks."""
        self._steps += 1

    def step_done(self) -> None:
        """Ends the generation batches whose last part is in a finished optimizer step.

        Blocks for the hub's answer if there are ranks, at most a second.
        """
        while self._held and self._held[0][0] <= self._steps:
            _, step, batch = self._held.popleft()
            batch.release()
            if self._rank is not None:
                self._rank.report_done()
            if self.feed is not None and step is not None:
                self.feed.trained(step)

    def failed(self, error: BaseException, groups: Sequence[Group] = ()) -> None:
        """Notes that a step failed over all that is held: it comes again, or is set aside, as `Feed.failed`.

        With several processes this one's part of it is counted, of which `groups` alone if they are given;
        it comes to the next processes.
        """
        if self._rank is not None:
            if blames_groups(error):
                self._rank.report_failed(groups)
        elif self.feed is not None and self._held:
            steps = [step for _, step, _ in self._held if step is not None]
            self._held.clear()
            self.feed.failed(steps, error)

    def give_back(self) -> None:
        """Ends what is held, untrained: it comes next. With several processes it stays. Never blocks."""
        while self._held and self._rank is None and self.feed is not None:
            if (step := self._held.pop()[1]) is not None:
                self.feed.give_back(step)

    # -- checkpoints and versions: for the hub's process; those that other processes call do nothing there

    def begin(self, checkpoint: str | None) -> bool:
        """Begins training: what is held comes again, and what the checkpoint contains is not trained again.

        Returns whether nothing is held any more: with several processes, what is held stays, unless a
        checkpoint is loaded.
        Blocks for the disk. Raises BridgeAhead: the bridge was trained before, and neither a checkpoint nor
        `start` says how to go on.
        """
        self.give_back()
        if goes_back := checkpoint is not None and self._has_begun:
            self._forget()  # what was trained since is not in the model any more
            self._has_begun = False
        if self.feed is not None:
            if goes_back:
                self.feed.close()
                self.feed = self._open(self._trainer)
            if not (checkpoint is None or self.feed.load_state(checkpoint)):
                log.warning("checkpoint %s lists no groups: those that come again are trained", checkpoint)
            self.feed.require_start()
        return not self._held

    def _forget(self) -> None:
        """Ends what this process still reads, without release: it comes to the next consumer."""
        while self._held:
            abandon(self._held.popleft()[2].records)

    @property
    def is_hub(self) -> bool:
        """Whether this process is the bridge's consumer."""
        return self.feed is not None

    @property
    def policy_version(self) -> int:
        """The newest version of the weights, published or noted; -1 before the first. Hub's process only."""
        assert self.feed is not None
        return self.feed.consumer.training_version

    def publish(self, version: int, *, to_environments: bool = True) -> None:
        """Publishes the policy version, or only notes it for the staleness of batches."""
        has_begun, self._has_begun = self._has_begun, True  # with the first version, which is published
        if self.feed is None:
            return
        if not to_environments:
            self.feed.consumer.note_training_version(version)
        elif has_begun:
            self.feed.publish(version)
        else:
            self.feed.begin_run(version)

    def drain(self) -> None:
        """Takes no new records; training ends with Drained after those already there. Hub's process only."""
        assert self.feed is not None
        self.feed.drain()

    # -- counters

    def _count(self, batch: Batch, rows: Rows) -> None:
        self._ignored.update(rows.ignored)
        first = [name for name in _ODD_SAMPLING if rows.counts[name] and not self._counts[name]]
        self._counts.update({name: int(count) for name, count in rows.counts.items()})
        self._counts["batches"] += 1
        self._counts["groups"] += batch.group_count
        if first:
            log.warning(
                "%s of bridge %r: these rows were sampled otherwise than the trainer's temperature says, so "
                "their log-probabilities do not fit its own -> sample with temperature=%s, without top_p, "
                "top_k and min_p",
                ", ".join(f"{name}={int(rows.counts[name])}" for name in first),
                self.bridge,
                self._trainer.temperature,
            )
        if scores := [float(score) for score in rows.columns.get("score", ()) if score is not None]:
            self._fresh["score"] = sum(scores) / len(scores)
        if self.feed is None:
            return
        version, own = self.feed.consumer.training_version, compress(batch.meta, rows.unscored)
        if found := lags((meta.min_policy_version for meta in batch.meta), version):
            self._fresh |= {"staleness_mean": sum(found) / len(found), "staleness_max": float(max(found))}
        stale = sum(0 <= meta.min_policy_version < version for meta in own)
        if stale and not self._counts["rows_stale_as_fresh"]:
            warn_of_stale_rows(self.bridge, stale, "have environments record inference_logprobs")
        self._counts["rows_stale_as_fresh"] += stale

    def stats(self) -> dict[str, float]:
        """Returns flat counters of this process, and those of the feed in the hub's. Never blocks.

        `columns_ignored_total{name}` counts rows of columns that went nowhere.
        """
        mine = {f"trl_{name}_total": float(count) for name, count in self._counts.items()}
        mine |= {f"columns_ignored_total{{{name}}}": float(rows) for name, rows in self._ignored.items()}
        mine["trl_batches_held"] = float(len(self._held))
        return mine if self.feed is None else self.feed.stats() | mine

    def metrics(self) -> dict[str, float]:
        """Returns what is new since the last call, as `bridge/...` for the trainer's log. Never blocks."""
        fresh, self._fresh = self._fresh, {}
        rows = ("filled", "left_out", "untrained", "truncated", "without_logprobs")
        names = [*(f"rows_{name}" for name in rows), "groups_fallback"]
        totals = {f"bridge/{name}_total": float(self._counts[name]) for name in names}
        return {f"bridge/{name}": value for name, value in fresh.items()} | totals

    # -- the end

    def close(self) -> None:
        """Closes the bridge. Held records, and those not yet taken, come to the next consumer. Idempotent."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; an exception counts as a failure of what is held, as of `Feed`."""
        self.closed = True
        if self._rank is not None and blames_groups(error):
            self._rank.report_failed()
        self._forget()
        if self._rank is not None:
            self._rank.close()
        if self.feed is not None:
            self.feed.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<ShmRollouts of {self.bridge!r}: {self._counts['batches']} batches, {len(self._held)} held>"


def check_options(bridge: str, credit: Any, consumer: dict[str, Any]) -> None:
    """Raises BadBridgeName, or TypeError: no Credit, or Consumer has no such option. Never blocks."""
    check_bridge_name(bridge)
    if not isinstance(credit, Credit):
        raise TypeError(f"credit={credit!r} -> Credit(estimator=...) of shmbridge.consumers.trajectories")
    inspect.signature(shmbridge.Consumer).bind(bridge, **consumer)


shm_rollout_func = ShmRollouts  # `rollout_func` is TRL's word for it
