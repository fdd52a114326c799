"""A bridge in place of rollout worker and weight transfer of TRL's experimental `AsyncGRPOTrainer`.

    worker = ShmRolloutWorker("run1")
    AsyncGRPOTrainer("model", args=..., train_dataset=placeholder, rollout_worker=worker,
                     weight_transfer=ShmWeightTransfer(worker, "http://127.0.0.1:8000")).train()

**Released**: TRL does not say which samples a step trained. Its data loader fetches one micro-batch ahead and
its planner one sample beyond that, so a sample is trained by the third optimizer step's end after it was
handed out. Records are released at the third `update_model_version` after their last sample was handed out;
TRL calls it every `weight_sync_steps` steps. `hold="none"` releases them when they are handed out.

So also after an orderly end the groups of the last three updates come again, though some were trained: TRL
saves without a word to its worker. A step that fails stops the worker: all that is not released has then
failed once. The hub is the trainer's main process; TRL distributes what it packs through accelerate.
"""

from __future__ import annotations

import math
import queue
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import shmbridge
from shmbridge.consumers.engines.engine import Pause
from shmbridge.consumers.feed import Feed, Start, Step, Unfit, check_words, warn_if_untested
from shmbridge.consumers.trajectories import Credit, Trajectory, columns_ignored
from shmbridge.consumers.trl.rollouts import ALL, READ, check_options
from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks

TESTED = ("trl", "1.16", "1.17")
UPDATES_HELD = 3  # why: the module's first lines

Unscored = Literal["refuse", "skip"]
Hold = Literal["updates", "none"]

_DEFAULT = Credit()
_READ = READ | {"score", "reward_components"}


class NoProducers(RuntimeError):
    """No producer of the bridge is alive, and nothing came for the trainer's `heartbeat_stale_after_s`."""


class ShmRolloutWorker:
    """TRL's `RolloutWorkerProtocol` on a bridge. Made in every process, opened in the main one only.

    The environments play by themselves; `start` lets the trainer take what they made. Samples are numpy views
    of each batch's arrays: no list, no pickle, no child process.

    Args:
        bridge: its name.
        max_staleness: groups that are more versions behind are discarded whole and counted by the bridge;
            None: only TRL's own `max_staleness` drops, sample by sample.
        per_token: for rows with several advantages, see `samples_of`: "split", "refuse" or "mean".
        most_parts: samples that a row may be split into.
        unscored: for rows without the sampler's log-probabilities: "refuse" (NoLogprobs), or "skip": released
            with their group, untrained and counted.
        hold: "updates" or "none", see above.
        groups: groups gathered at a time.
        credit: how advantages are computed for groups without their own.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole; otherwise not at all.
        set_aside_after, unfit, longest_row, start, run_dir: as of `Feed`.
        consumer: further options of shmbridge.Consumer.

    Raises:
        ValueError: an argument is not one of the allowed values. TypeError: Consumer has no such option.
    """

    def __init__(
        self,
        bridge: str,
        *,
        max_staleness: int | None = None,
        per_token: PerToken = "split",
        most_parts: int = 64,
        unscored: Unscored = "refuse",
        hold: Hold = "updates",
        groups: int = 1,
        credit: Credit = _DEFAULT,
        whole_rows: bool = False,
        set_aside_after: int = 2,
        unfit: Unfit = "refuse",
        longest_row: int | None = None,
        start: Start | None = None,
        run_dir: str | Path | None = None,
        **consumer: Any,
    ) -> None:
        check_words(locals(), per_token=get_args(PerToken), unscored=get_args(Unscored), hold=get_args(Hold))
        check_options(bridge, credit, consumer)
        warn_if_untested(*TESTED)
        self.bridge, self.per_token, self.most_parts, self.unscored = bridge, per_token, most_parts, unscored
        run = shmbridge.Run(batch_size=64, max_token_len=0, num_steps=ALL)
        self._options: dict[str, Any] = {"run": run, "start": start, "run_dir": run_dir, **consumer}
        self._options |= {"max_staleness": max_staleness, "groups": groups, "credit": credit}
        self._options |= {"whole_rows": whole_rows, "set_aside_after": set_aside_after}
        self._options |= {"unfit": unfit, "longest_row": longest_row}
        held_for = UPDATES_HELD if hold == "updates" else None
        self.rollout_buffer = SampleBuffer(self._fetch, lambda step: self._open().trained(step), held_for)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model_version = 0  # TRL's number
        self._lift = 0  # added to TRL's number to make the policy version
        self._feed: Feed | None = None
        self._has_begun = False  # whether the run is announced
        self._wait, self._is_waiting = ExitStack(), False  # from a call in vain to the next that is not
        self._numbers = count()
        self._counts: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._said: Counter[str] = Counter()
        self._last_s = time.monotonic()

    # -- what TRL calls

    def start(self) -> None:
        """Opens the bridge, and announces a run to environments that wait for one. Does not block.

        Raises ConsumerTaken: the bridge has a living consumer. BridgeAhead: it was trained before, and
        `start` does not say how to go on.
        """
        self._open()
        self._last_s = time.monotonic()

    def stop(self) -> None:
        """Closes the bridge; what is not released comes to the next consumer. Idempotent.

        Called while an exception ends training, it counts as a failure of what is not released.
        """
        self.rollout_buffer.clear()
        self._end_wait()
        if self._feed is not None:
            error = sys.exception()
            self._feed.__exit__(None if error is None else type(error), error, None)

    def update_model_version(self, model_version: int) -> None:
        """Publishes the policy version, and releases what is trained by now. Never blocks.

        Args:
            model_version: TRL's number; `policy_version` is the bridge's.
        """
        feed = self._open()
        if self._lift + model_version < feed.consumer.policy_version:
            self._lift = feed.consumer.policy_version + 1 - model_version
        self.model_version = model_version
        (feed.publish if self._has_begun else feed.begin_run)(self.policy_version)
        self._has_begun = True
        self.rollout_buffer.updated()
        self._push_metrics()

    def check_health(self, stale_after_s: float) -> None:
        """Raises NoProducers if none lives, and nothing came for so many seconds. Never blocks.

        A slow producer that is alive raises nothing. The buffer raises Drained.
        """
        waited_s = time.monotonic() - self._last_s
        if waited_s > stale_after_s and not self._open().stats()["lanes_live"]:
            self._give_back()
            raise NoProducers(
                f"bridge {self.bridge!r} has no living producer, and gave nothing for {waited_s:.0f} s, "
                f"allowed are {stale_after_s:g} -> start the environments, or see why they ended"
            )

    # -- versions

    @property
    def policy_version(self) -> int:
        """The bridge's number of the weights that are live."""
        return self._lift + self.model_version

    def next_policy_version(self, free: int) -> int:
        """Returns the number that the next update will publish, lifted to the next free one if it is below.

        Never blocks. For `ShmWeightTransfer`, which stamps weights before TRL counts them. Raises BridgeAhead
        as `start`.
        """
        self._open()
        self._lift = max(self._lift, free - self.model_version - 1)
        return self._lift + self.model_version + 1

    # -- samples

    def _open(self) -> Feed:
        if self._feed is None:
            # exact: suspects of a failure come one set at a time; together: TRL keeps what it has got
            feed = Feed(self.bridge, exact=True, trained_together=ALL, release_at="step", **self._options)
            try:
                feed.require_start()
            except BaseException:
                feed.close()
                raise
            self._feed = feed
        return self._feed

    def _fetch(self, timeout_s: float | None) -> tuple[Step, list[RolloutSample]]:
        feed, step = self._open(), None
        try:
            step = feed.take(timeout_s)
            samples = self._samples(step)
        except shmbridge.ConsumerEmpty:
            if timeout_s != 0.0 and not self._is_waiting:  # TRL asks again, with seconds each time: one wait
                self._is_waiting = True
                self._wait.enter_context(feed.consumer.one_wait())
            raise queue.Empty from None
        except BaseException as error:
            self._give_back()
            if step is not None:
                feed.failed(step, error)
            raise
        self._end_wait()
        self._last_s = time.monotonic()
        return step, samples

    def _give_back(self) -> None:
        """Ends what is held, which is not at fault in the error that comes: it comes again."""
        for step in reversed(self.rollout_buffer.clear()):
            self._open().give_back(step)

    def _end_wait(self) -> None:
        self._is_waiting = False
        self._wait.close()

    def _samples(self, step: Step) -> list[RolloutSample]:
        batch, rows, metrics = step.batch, step.rows, step.metrics
        ids = [next(self._numbers) for _ in range(batch.group_count)]
        now, clock_ns = time.time(), time.monotonic_ns()
        made: list[RolloutSample] = []
        said = Counter[str]()
        for row in rows:
            if row.logprobs is None and row.trained.any() and self.unscored == "skip":
                said["rows_without_logprobs"] += 1
                continue
            values = different_advantages(row)
            parts = samples_of(row, values, self.per_token, self.most_parts)
            said["rows_untrained"] += not parts
            said["rows_split"] += len(parts) > 1
            said["samples_added"] += max(len(parts) - 1, 0)
            said["rows_averaged"] += len(values) > len(parts)
            said["rows_unstamped"] += row.meta.min_policy_version < 0
            made += [
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=part.tokens,
                    completion_mask=part.mask,
                    old_log_probs=part.logprobs,
                    advantage=part.advantage,
                    model_version=self._version_of(row),
                    group_id=ids[int(batch.group_index[row.row])],
                    metrics=_rewards(row),
                    enqueued_at=now - (clock_ns - row.meta.t_publish_ns) / 1e9,
                )
                for part in parts
            ]
        said["rows"] += len(rows)
        said["groups_fallback"] += int(metrics["groups_fallback"])
        self._counts.update(said)
        self._ignored.update(columns_ignored(batch, _READ))
        return made

    def _version_of(self, row: Trajectory) -> int:
        """Returns the oldest version that sampled the row, as TRL's number; one without counts as new."""
        stamped = row.meta.min_policy_version
        return self.model_version if stamped < 0 else stamped - self._lift

    # -- counters

    def _push_metrics(self) -> None:
        """Hands TRL what was counted since the last update; it sums names that end in `total`."""
        new = {name: count - self._said[name] for name, count in self._counts.items()}
        self._said = Counter(self._counts)
        self.metrics_queue.put_nowait({f"bridge/{name}_total": float(count) for name, count in new.items()})

    def stats(self) -> dict[str, float]:
        """Returns flat counters, with the feed's if it is open. Never blocks.

        `columns_ignored_total{name}` counts rows of columns that went nowhere.
        """
        mine = {f"trl_{name}_total": float(count) for name, count in self._counts.items()}
        mine |= {f"columns_ignored_total{{{name}}}": float(rows) for name, rows in self._ignored.items()}
        mine["trl_batches_held"] = float(self.rollout_buffer.steps_held)
        return mine if self._feed is None else self._feed.stats() | mine


class ShmWeightTransfer:
    """TRL's `WeightTransferProtocol`: a bridge's weights segment in place of NCCL. Made in every process,
    opened in the main one only.

    Weights and rollouts have the same version numbers: those that `worker` publishes.

    Args:
        worker: the rollout worker of the same trainer; its bridge carries the weights.
        engine: what `WeightSync` takes: a URL, a vLLM engine, or a list; empty: engines that follow the
            segment by themselves, such as the policy server.
        pause: how an engine treats requests in flight while it loads.
        timeout_s: limit for the engines' part of a version.
    """

    def __init__(
        self, worker: ShmRolloutWorker, engine: Any = (), *, pause: Pause = "keep", timeout_s: float = 300.0
    ) -> None:
        self._worker, self._engine, self._pause, self._timeout_s = worker, engine, pause, timeout_s
        self._sync: WeightSync | None = None

    def init_weight_transfer(self) -> None:
        """Becomes the writer of the bridge's weights. Does not block.

        Raises ConsumerTaken: another process writes them. EngineFailed: `engine` is not an engine.
        """
        if self._sync is None:
            self._sync = WeightSync(
                self._worker.bridge, self._engine, pause=self._pause, timeout_s=self._timeout_s
            )

    def pause(self) -> None:
        """Does nothing: engines sample on while the segment is written, and pause only to load it."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Writes a version into the segment and loads it into the engines. Blocks for both.

        Raises EngineFailed, WeightsMismatch, WeightsBusy: as `WeightSync.push`. TRL's other processes gather
        with it, also the rest after an error.
        """
        assert self._sync is not None, "init_weight_transfer comes first"
        version = self._worker.next_policy_version(self._sync.next_version())
        push_from_ranks(self._sync, iterator, version)

    def resume(self) -> None:
        """Does nothing: engines sample again when `send_weights` returns."""

    def destroy(self) -> None:
        """Closes the segment; the last version stays readable. Idempotent."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None


def _rewards(row: Trajectory) -> dict[str, float]:
    """Returns TRL's reward metrics of a sample."""
    parts = row.value("reward_components") or {}
    reward = {"reward": math.nan if row.score is None else row.score}
    return reward | {f"rewards/{name}": float(value) for name, value in parts.items()}


PerToken = Literal["split", "refuse", "mean"]


class PerTokenAdvantages(ValueError):
    """A row has several advantages, and TRL's async trainer takes one; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample; the arrays are views of the batch's, but for masks of rows that were split."""

    tokens: npt.NDArray[np.int32]  # (L,)
    mask: npt.NDArray[np.uint8]  # (L,)
    logprobs: npt.NDArray[np.float32]  # (L,) nats
    advantage: float


def different_advantages(row: Trajectory) -> npt.NDArray[np.float32]:
    """Returns the different advantages of a row's trained tokens, rising; empty if none is trained."""
    return np.unique(row.advantages[row.trained])


def samples_of(
    row: Trajectory, values: npt.NDArray[np.float32], per_token: PerToken, most_parts: int
) -> list[Sample]:
    """Returns the samples of a row; empty if nothing in it is trained. Never blocks.

    Args:
        row: with log-probabilities.
        values: its different advantages.
        per_token: what becomes of a row with several advantages: "split" (exact), "refuse", or "mean" (of its
            trained tokens, for all of them).
        most_parts: samples that a row may be split into.

    Raises:
        NoLogprobs: the row has none. PerTokenAdvantages: refused, or more parts than allowed.
    """
    if not len(values):
        return []
    logprobs, whole = row.known_logprobs("unscored='skip'"), row.trained.view(np.uint8)
    if len(values) == 1:
        return [Sample(row.tokens, whole, logprobs, float(values[0]))]
    if per_token == "mean":
        return [Sample(row.tokens, whole, logprobs, float(row.advantages[row.trained].mean()))]
    if per_token == "refuse" or len(values) > most_parts:
        raise PerTokenAdvantages(
            f"{row.named} has {len(values)} different advantages from {values[0]:g} to {values[-1]:g}, and a "
            f"sample of TRL has one -> per_token='split' with most_parts={len(values)}, or per_token='mean'"
        )
    return [
        Sample(row.tokens, (row.trained & (row.advantages == value)).view(np.uint8), logprobs, float(value))
        for value in values
    ]


_LONG_AGO = 1 << 60  # updates: a step without samples is over at once


@dataclass(slots=True)
class _Held:
    """A step of the feed, and how far its samples have gone."""

    step: Step
    left: int  # samples not yet handed out
    update: int = 0  # weight updates before its last sample was handed out


class SampleBuffer:
    """`queue.Queue` as far as TRL uses it. For one thread.

    Args:
        fetch: returns a step and its samples; blocks at most the given seconds (None: for ever), then raises
            queue.Empty.
        trained: called with each step that is over.
        held_for: weight updates after the one in which a step's last sample was handed out, at whose end it
            is over; None: with that sample.
    """

    def __init__(
        self,
        fetch: Callable[[float | None], tuple[Step, list[Any]]],
        trained: Callable[[Step], None],
        held_for: int | None,
    ) -> None:
        self._fetch, self._trained, self._held_for = fetch, trained, held_for
        self._ready: deque[tuple[Any, _Held | None]] = deque()
        self._held: deque[_Held] = deque()
        self._updates = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Returns the next sample. Blocks at most `timeout` seconds (None: for ever), then queue.Empty."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = 0.0 if not block else None if until is None else max(until - time.monotonic(), 0.0)
            step, samples = self._fetch(left)
            held = _Held(step, len(samples), self._updates if samples else self._updates - _LONG_AGO)
            self._ready.extend((sample, held) for sample in samples)
            self._held.append(held)
            self._end()
        sample, held_by = self._ready.popleft()
        if held_by is not None:
            held_by.left -= 1
            held_by.update = self._updates
            self._end()
        return sample

    def get_nowait(self) -> Any:
        """`get` without waiting."""
        return self.get(block=False)

    def put_nowait(self, sample: Any) -> None:
        """Adds a sample that is not from the bridge, behind those already here. Never blocks."""
        self._ready.append((sample, None))

    def qsize(self) -> int:
        """Returns the samples that are made already; groups wait in the bridge besides. Never blocks."""
        return len(self._ready)

    def empty(self) -> bool:
        """Whether `get_nowait` would have to ask the bridge. Never blocks."""
        return not self._ready

    @property
    def steps_held(self) -> int:
        """Steps that are not over."""
        return len(self._held)

    def updated(self) -> None:
        """Notes a weight update, and ends what it shows to be trained. Never blocks."""
        self._updates += 1
        self._end()

    def _end(self) -> None:
        """Ends steps in order; those without samples at once."""
        while self._held and self._is_over(self._held[0]):
            self._trained(self._held.popleft().step)

    def _is_over(self, held: _Held) -> bool:
        if held.left:
            return False
        return self._held_for is None or self._updates >= held.update + self._held_for

    def clear(self) -> list[Step]:
        """Forgets all; returns the steps that are not over. Never blocks."""
        self._ready.clear()
        held = [each.step for each in self._held]
        self._held.clear()
        return held
