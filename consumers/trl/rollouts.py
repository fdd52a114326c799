"""Groups of a bridge in place of TRL's own generation: what `rollout_func` of `GRPOTrainer` is given.

    rollouts = shm_rollout_func("run1", max_staleness=2)
    ShmGRPOTrainer("model", args=GRPOConfig(max_steps=100, ...), rollout_func=rollouts).train()

The environments own the prompts: what TRL passes is ignored but for its number. `grpo.py` says when records
are released. Imports no TRL.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any, Literal, Self, get_args

import shmbridge
from shmbridge import Batch
from shmbridge.config import check_bridge_name
from shmbridge.consumers.trainer_settings import warn_of_stale_rows
from shmbridge.consumers.trajectories import Credit
from shmbridge.consumers.trl.rows import Rows, rows_of
from shmbridge.record.leases import abandon

log = logging.getLogger(__name__)

Uneven = Literal["refuse", "fill", "skip"]

_DEFAULT = Credit()
_ODD_SAMPLING = ("rows_other_temperature", "rows_cut_sampling")


class BridgeDrained(RuntimeError):
    """The bridge is drained: no batch comes any more. What was trained is released."""


class NotJoined(TypeError):
    """The rollouts were given to a trainer that would not use their advantages, nor release their records."""


class ShmRollouts:
    """The generation batches of one trainer process, and their leases; `shm_rollout_func` is this class.

    A context manager, for the trainer's thread. Making one does not block: the trainer opens the bridge.

    Args:
        bridge: its name.
        max_staleness: groups that are more versions behind the policy when their batch is handed out are
            discarded and counted; None: no limit.
        uneven: what to do where groups do not have `num_generations` rows: "refuse" (UnevenGroups, nothing is
            released), "fill" (fully masked rows in place of missing ones, counted; too many rows are still
            refused) or "skip" (such groups are released untrained, and counted in `screened_total`).
        credit: how advantages are computed for groups without their own; `Credit(fallback=False)` refuses
            these.
        prefetch: batches gathered ahead, still held.
        timeout_s: seconds that a generation waits for a batch, then ConsumerEmpty; None: for ever, with a
            warning for each minute.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole; otherwise not at all.
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
        **consumer: Any,
    ) -> None:
        if uneven not in get_args(Uneven):
            raise ValueError(f"uneven={uneven!r} is none of {', '.join(get_args(Uneven))}")
        check_options(bridge, credit, consumer)
        self.bridge, self.uneven, self._credit = bridge, uneven, credit
        self._max_staleness, self._prefetch, self._timeout_s = max_staleness, prefetch, timeout_s
        self._whole_rows, self._options = whole_rows, consumer
        self._trainer: Any = None
        self._consumer: shmbridge.Consumer | None = None
        self._rank: shmbridge.Rank | None = None
        self._batches: Iterator[Batch] | None = None
        self._held: deque[tuple[int, Batch]] = deque()  # micro-steps after which nobody needs it, batch
        self._steps = 0
        self._counts: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._fresh: dict[str, float] = {}
        self.latest: Rows | None = None  # of the last call
        self.closed = False

    # -- opening

    def join(self, trainer: Any, *, rank: int, world_size: int, groups: int) -> None:
        """Opens the bridge for a trainer's process. Does not wait for other processes.

        Rank 0 of several is the consumer, and deals the shares out.

        Args:
            trainer: the only one whose calls are answered.
            rank: 0 to world_size - 1.
            world_size: processes of the trainer.
            groups: groups in a generation batch of one process.

        Raises:
            ConsumerTaken, RankTaken: the place is taken. ValueError: joined already.
        """
        if self._trainer is not None:
            raise ValueError(f"the rollouts of bridge {self.bridge!r} have a trainer already -> make others")
        if rank == 0:
            rows = groups * world_size * trainer.num_generations
            run = shmbridge.Run(batch_size=rows, max_token_len=0, num_steps=(1 << 31) - 1)
            self._consumer = shmbridge.Consumer(self.bridge, **{"run": run, **self._options})
            if self.uneven == "skip":
                self._consumer.screen(lambda group: group.rows == trainer.num_generations)
        if world_size > 1:
            if self._consumer is not None:
                self._consumer.serve_ranks(
                    world_size,
                    groups=groups * world_size,
                    max_staleness=self._max_staleness,
                    prefetch=max(self._prefetch, 1),  # the next one may begin before the step of the last
                )
            self._rank = shmbridge.Rank(self.bridge, rank, world_size)
        self._trainer, self._groups = trainer, groups
        embedding = trainer.model.get_input_embeddings()
        self._vocabulary: int | None = getattr(embedding, "num_embeddings", None)

    def _next(self) -> Batch:
        if self._batches is None:
            if self._rank is not None:
                self._batches = self._rank.batches(timeout_s=self._timeout_s, hold="caller")
            else:
                assert self._consumer is not None
                self._batches = self._consumer.batches(
                    groups=self._groups,
                    max_staleness=self._max_staleness,
                    prefetch=self._prefetch,
                    timeout_s=self._timeout_s,
                    hold="caller",
                )
        try:
            return next(self._batches)
        except StopIteration:
            raise BridgeDrained(
                f"bridge {self.bridge!r} is drained and has no further batch of {self._groups} groups per "
                "process -> save the model; a new run needs a bridge that is not drained"
            ) from None
        except BaseException:  # Ctrl-C, too: an iteration that raised is over, the next call begins another
            self._batches = None
            raise

    # -- what the trainer calls

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Returns the next generation batch as TRL's `rollout_func` must. Blocks until there is one.

        Token ids and masks are int64 arrays (no lists); other columns are values for reward functions, one
        per row. The records stay leased.

        Args:
            prompts: as many as rows are wanted; their text is not used.
            trainer: the trainer that joined.

        Raises:
            UnevenGroups, UnknownTokens, NoAdvantages: of the batch, which stays un-released. BridgeDrained.
            ConsumerEmpty.
            NotJoined: another trainer calls, or an evaluation.
        """
        if trainer is not self._trainer:
            raise NotJoined(
                f"{type(trainer).__name__} would use neither advantages per token nor release records -> "
                "ShmGRPOTrainer"
            )
        if not trainer.model.training:
            raise NotJoined("evaluation asks for rollouts of its own prompts -> eval_strategy='no'")
        batch = self._next()
        rows = rows_of(
            batch,
            len(prompts),
            pad_id=getattr(trainer.processing_class, "tokenizer", trainer.processing_class).pad_token_id,
            credit=self._credit,
            temperature=trainer.temperature,
            fill=self.uneven == "fill",
            whole_rows=self._whole_rows,
            mask_truncated=trainer.args.mask_truncated_completions,
            vocabulary=self._vocabulary,
        )
        every = trainer.args.steps_per_generation * trainer.num_iterations
        self._held.append((self._steps + every, batch))
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
        """Releases the generation batches whose last part is in a finished optimizer step.

        Blocks for the hub's answer if there are ranks, at most a second.
        """
        released = False
        while self._held and self._held[0][0] <= self._steps:
            self._held.popleft()[1].release()
            released = True
        if released and self._rank is not None:
            self._rank.report_done()

    @property
    def is_hub(self) -> bool:
        """Whether this process is the bridge's consumer."""
        return self._consumer is not None

    @property
    def policy_version(self) -> int:
        """The newest version of the weights, published or noted; -1 before the first. Hub's process only."""
        assert self._consumer is not None
        return self._consumer.training_version

    def publish(self, version: int, *, to_environments: bool = True) -> None:
        """Publishes the policy version, or only notes it for the staleness of batches. Hub's process only."""
        assert self._consumer is not None
        if to_environments:
            self._consumer.publish_policy_version(version)
        else:
            self._consumer.note_training_version(version)

    def drain(self) -> None:
        """Takes no new records; training ends with BridgeDrained after those already there. Hub's process."""
        assert self._consumer is not None
        self._consumer.drain()

    # -- counters

    def _count(self, batch: Batch, rows: Rows) -> None:
        self._ignored.update(rows.ignored)
        first = [name for name in _ODD_SAMPLING if rows.counts[name] and not self._counts[name]]
        self._counts.update({name: int(count) for name, count in rows.counts.items()})
        self._counts["batches"] += 1
        self._counts["groups"] += batch.group_count
        self._counts["records_redelivered"] += sum(record.meta.redelivered for record in batch.records)
        if first:
            log.warning(
                "%s of bridge %r: these rows were sampled otherwise than the trainer's temperature says, so "
                "their log-probabilities do not fit its own -> sample with temperature=%s, without top_p, "
                "top_k and min_p",
                ", ".join(f"{name}={int(rows.counts[name])}" for name in first),
                self.bridge,
                self._trainer.temperature,
            )
        scores = [float(score) for score in rows.columns.get("score", ()) if score is not None]
        if scores:
            self._fresh["score"] = sum(scores) / len(scores)
        if self._consumer is None or not (lags := _lags(batch, self._consumer.training_version)):
            return
        self._fresh |= {"staleness_mean": sum(lags) / len(lags), "staleness_max": float(max(lags))}
        version, own = self._consumer.training_version, compress(batch.meta, rows.unscored)
        stale = sum(0 <= meta.min_policy_version < version for meta in own)
        if stale and not self._counts["rows_stale_as_fresh"]:
            warn_of_stale_rows(self.bridge, stale, "have environments record inference_logprobs")
        self._counts["rows_stale_as_fresh"] += stale

    def stats(self) -> dict[str, float]:
        """Returns flat counters of this process, and those of the bridge in the hub's. Never blocks.

        `columns_ignored_total{name}` counts rows of columns that went nowhere.
        """
        mine = {f"trl_{name}_total": float(count) for name, count in self._counts.items()}
        mine |= {f"columns_ignored_total{{{name}}}": float(rows) for name, rows in self._ignored.items()}
        mine["trl_batches_held"] = float(len(self._held))
        return mine if self._consumer is None else self._consumer.stats() | mine

    def metrics(self) -> dict[str, float]:
        """Returns what is new since the last call, as `bridge/...` for the trainer's log. Never blocks."""
        fresh, self._fresh = self._fresh, {}
        rows = ("filled", "untrained", "truncated", "without_logprobs")
        names = [*(f"rows_{name}" for name in rows), "groups_fallback"]
        totals = {f"bridge/{name}_total": float(self._counts[name]) for name in names}
        return {f"bridge/{name}": value for name, value in fresh.items()} | totals

    # -- the end

    def close(self) -> None:
        """Closes the bridge. Held records, and those not yet taken, come to the next consumer. Idempotent."""
        self.closed = True
        while self._held:
            abandon(self._held.popleft()[1].records)
        self._batches = None
        if self._rank is not None:
            self._rank.close()
        if self._consumer is not None:
            self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ShmRollouts of {self.bridge!r}: {self._counts['batches']} batches, {len(self._held)} held>"


def check_options(bridge: str, credit: Any, consumer: dict[str, Any]) -> None:
    """Raises BadBridgeName, or TypeError: no Credit, or Consumer has no such option. Never blocks."""
    check_bridge_name(bridge)
    if not isinstance(credit, Credit):
        raise TypeError(f"credit={credit!r} -> Credit(estimator=...) of shmbridge.consumers.trajectories")
    inspect.signature(shmbridge.Consumer).bind(bridge, **consumer)


def _lags(batch: Batch, version: int) -> list[int]:
    """Returns the versions that each row is behind, of the rows that were stamped."""
    stamps = (meta.min_policy_version for meta in batch.meta)
    return [max(version - stamp, 0) for stamp in stamps if stamp >= 0]


shm_rollout_func = ShmRollouts  # `rollout_func` is TRL's word for it
