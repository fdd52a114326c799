"""One optimizer step, from taking its batches to their release.

The order is a contract: update, publish the weights, publish their version, save if due, release. Engines
load the version in parallel, and have it before the next one is published. If the learner is killed before
the release, its successor gets the batches again; the checkpoint says whether it contains them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

import shmbridge
from shmbridge.consumers.feed import lacks_memory
from shmbridge.consumers.learner.config.options import EarlyStopConfig, EvaluationConfig, LearnerConfig
from shmbridge.consumers.learner.data.batch_source import HubSource, may_be_data
from shmbridge.consumers.learner.data.left_out import SaidOnce
from shmbridge.consumers.learner.data.loss_arrays import TrainingRows
from shmbridge.consumers.learner.data.rank_source import RankSource
from shmbridge.consumers.learner.data.row_checks import DIFFERENCE
from shmbridge.consumers.learner.model.eval_mode import evaluating
from shmbridge.consumers.learner.report.logs import MetricsLog
from shmbridge.consumers.learner.report.samples import SampleLog
from shmbridge.consumers.learner.report.step_metrics import (
    LearnerMetrics,
    StepCost,
    merged,
    of_all_ranks,
    rows_of_environments,
)
from shmbridge.consumers.learner.train.broken_step import free_activations, is_of_device
from shmbridge.consumers.learner.train.early_stop import EarlyStop
from shmbridge.consumers.learner.train.engine_pushes import EnginePushes
from shmbridge.consumers.learner.train.evaluation import EvalHook, TrainingScreen, load_hook
from shmbridge.consumers.learner.train.grpo_update import Learner
from shmbridge.consumers.learner.train.mismatch import MISMATCH, MismatchAlarm
from shmbridge.consumers.learner.train.objective import SHARES
from shmbridge.consumers.learner.train.publishing import PublishWeights
from shmbridge.consumers.learner.train.saving import Saver
from shmbridge.consumers.learner.types import Metrics
from shmbridge.consumers.learner.world import say


class RunHooks:
    """The parts of a run besides its steps: evaluation, early stopping, engines. Raises `BadHook`."""

    def __init__(
        self, evaluation: EvaluationConfig, early_stop: EarlyStopConfig, saver: Saver, tokenizer: Any = None
    ) -> None:
        self.engines = EnginePushes()  # none, unless the caller sets it
        self.samples: SampleLog | None = None  # likewise; the log's rank has it
        self.screen = TrainingScreen(saver.consumed)
        self.early_stop = EarlyStop(
            early_stop.condition, early_stop.stop_patience, early_stop.goal, early_stop.stop_stall, say=say
        )
        hook = evaluation.eval_hook
        self._hook = EvalHook(load_hook(hook), evaluation.eval_every, say) if hook else None
        self._tokenizer = tokenizer

    def metrics(self, learner: Learner) -> Metrics:
        """Returns the evaluation metrics after a step. Blocks as long as the hook; every rank calls it."""
        found, hook = self.screen.metrics(), self._hook
        if hook is None:
            return found
        if hook.is_due(learner.step):
            with evaluating(learner.model):
                found |= learner.read(lambda model: hook.called(learner.step, model, self._tokenizer))
        return found | {"eval/hook_failures_total": hook.failures_total}


class TrainingStep:
    """Takes batches until a step is full, then makes the step. One thread; every rank does the same.

    Only one rank has a log, which gets the metrics over all ranks.
    """

    def __init__(
        self,
        learner: Learner,
        source: HubSource | RankSource,
        publish_weights: PublishWeights,
        saver: Saver,
        log: MetricsLog | None,
        config: LearnerConfig,
        around: RunHooks,
    ) -> None:
        self._learner, self._source, self._publish, self._saver = learner, source, publish_weights, saver
        self._log, self._config, self._around = log, config, around
        self._describe = LearnerMetrics(config.batch.groups)
        self._cost, self._said = StepCost(), SaidOnce()
        self._alarm = MismatchAlarm(config.objective.mismatch_warn, say)
        self._batches: list[shmbridge.Batch] = []  # of this step
        self._parts: list[Metrics] = []
        self._waited_s = self._computed_s = 0.0
        self._waiting_since = time.monotonic()

    @property
    def begun(self) -> bool:
        """Whether a batch was taken for a step that is not made yet."""
        return bool(self._batches)

    @property
    def full(self) -> bool:
        """Whether all batches of the step were taken."""
        return len(self._batches) >= self._config.batch.accumulate

    def take(self, batch: shmbridge.Batch) -> None:
        """Adds a batch's gradient. Blocks for the compute and other ranks; raises as `accumulate`."""
        begun = time.monotonic()
        version = self._source.training_version
        aged = self._describe.taken(batch, int(begun * 1e9), version)
        look = self._looks_at(batch)
        self._parts.append(
            self._learner.accumulate(batch, version, first=not self._batches, look=look) | aged
        )
        self._batches.append(batch)
        self._waited_s += begun - self._waiting_since
        self._waiting_since = time.monotonic()
        self._computed_s += self._waiting_since - begun

    def _looks_at(self, batch: shmbridge.Batch) -> Callable[[TrainingRows], None] | None:
        """Returns what takes samples of a batch: of a step's last one, if the step is sampled."""
        samples, step = self._around.samples, self._learner.step + 1
        last = len(self._batches) + 1 >= self._config.batch.accumulate
        if samples is None or not last or not samples.due(step):
            return None
        return lambda rows: samples.pick(batch, rows, step)

    def settle(self) -> None:
        """Waits for the engines' push of the last version. Interruptible; every rank calls it.

        Raises:
            EngineFailed: an engine has failed for too long; PeerFailed on the other ranks.
        """
        if self._config.weights.engine:
            with self._learner.world.together():
                self._around.engines.settled()

    def make(self) -> Metrics:
        """Updates, publishes and saves if due, releases, logs; returns the metrics. Do not interrupt it."""
        learner, source = self._learner, self._source
        begun = time.monotonic()
        metrics = learner.apply()
        applied = time.monotonic()
        measured = self._measured()
        # from here on a checkpoint of this step lists its batches
        self._saver.took(self._batches, measured)
        accounted = time.monotonic()
        version = source.training_version + 1
        if learner.step % self._config.weights.publish_every == 0 or learner.step >= self._config.run.steps:
            self._publish_version(version)
        else:
            source.note_training_version(version)
        published = time.monotonic()
        metrics["policy_version"] = source.policy_version
        if DIFFERENCE in measured:  # once per rank
            say(
                f"{measured[DIFFERENCE]} -> what was trained is not what was put: end the run, and keep "
                "this line and the lane"
            )
        due = (
            learner.step % self._config.checkpoints.save_every == 0 or learner.step >= self._config.run.steps
        )
        if due:
            self._saver.save(source.training_version)
        source.trained(self._batches)
        if due:
            source.saved()
        if due or not source.holds:
            self._saver.consumed.released()
        metrics |= {
            **measured,
            "wait_s": self._waited_s,
            "forward_backward_s": self._computed_s,
            "update_s": applied - begun,
            "publish_s": published - accounted,
            **learner.times.taken(),
            **self._around.metrics(learner),
            **self._around.engines.metrics(),
            **self._cost.step(self._waited_s, measured["host_cpu_s"], measured["tokens"]),
            **self._alarm.looked(measured),
            "time": time.time(),
        }
        if self._log is not None:
            for sentence in self._said.sentences(measured):
                say(sentence)
            metrics |= self._describe.totals(measured, source.stats())
            self._log.append(metrics)
        self._batches, self._parts = [], []
        self._waited_s = self._computed_s = 0.0
        self._waiting_since = time.monotonic()
        return metrics

    def finish(self) -> None:
        """Publishes and saves what the last step did not. Blocks; every rank calls it; raises as `settle`."""
        if (version := self._source.training_version) > self._source.policy_version:
            self.settle()
            self._publish_version(version)
        self.save()

    def _publish_version(self, version: int) -> None:
        self._publish(version)
        self._source.publish_version(version)
        self._around.engines.begin(version)

    def save(self) -> None:
        """Writes a checkpoint unless this step has one, then releases what waits. Blocks for the disk."""
        self._saver.save(self._source.training_version)
        self._source.saved()
        self._saver.consumed.released()

    def begin_again(self, error: Exception) -> bool:
        """Gives a step that could not be computed back, to be tried again; returns whether that may help.

        Out of memory halves the micro-batches first, down to the longest row; any other error counts as a
        failure of the step's groups, see `feed.py`. Blocks for the disk. Raises the error if it is to end
        the run.
        """
        learner, source = self._learner, self._source
        if not (isinstance(source, HubSource) and learner.consistent) or is_of_device(error):
            return False
        if not (lacks_memory(error) or may_be_data(error)):
            return False
        what = (
            f"step {learner.step + 1} broke off: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )
        if short := lacks_memory(error):
            length, row = source.longest_row()
            now = min(learner.objective.micro_tokens, max(batch.token_count for batch in source.out()))
            if now <= length:
                error.add_note(f"a micro-batch is one row by now; the longest has {length} tokens: {row}")
                return False
            lower = max(length, now // 2)
            learner.objective = replace(learner.objective, micro_tokens=lower)
            say(
                f"{what} -> micro-batches of {lower} tokens from here on; the longest row has {length}: {row}"
            )
        free_activations(error)
        with suppress(RuntimeError):
            learner.drop_gradient()
            torch.cuda.empty_cache()
        self._batches, self._parts, self._waited_s, self._computed_s = [], [], 0.0, 0.0
        self._waiting_since = time.monotonic()
        if short:
            source.give_back()
        else:
            source.failed(error)
            say(f"{what} -> its groups are tried again")
        return True

    def _measured(self) -> Metrics:
        """Returns the batches' metrics combined as one batch, over all ranks."""
        rows = [rows_of_environments(batch) for batch in self._batches]
        own = merged(self._parts, rows)
        last = self._parts[-1]  # metrics that already cover all batches so far, or more than this step
        own |= {
            name: value
            for name, value in last.items()
            if name in SHARES or name in MISMATCH or name.startswith("api_perf/")
        }
        own["host_cpu_s"] = self._cost.cpu_s()
        return of_all_ranks(self._learner.world, own, sum(map(Counter, rows), Counter()))
