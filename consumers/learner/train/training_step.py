"""One optimizer step, from taking its batches to their release; evaluation, early stop and errors of a step.

The order is a contract: update, publish the weights, publish their version, save if due, release. Engines
load the version in parallel, and have it before the next one is published. If the learner is killed before
the release, its successor gets the batches again; the checkpoint says whether it contains them.
"""

from __future__ import annotations

import difflib
import importlib
import math
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import shmbridge
from shmbridge.consumers.evaluations import evaluation_metrics
from shmbridge.consumers.feed import lacks_memory
from shmbridge.consumers.learner import Metrics, Refusal
from shmbridge.consumers.learner.checkpoint import Consumed
from shmbridge.consumers.learner.config.options import (
    ComputeConfig,
    Condition,
    EarlyStopConfig,
    EvaluationConfig,
    Goal,
    LearnerConfig,
)
from shmbridge.consumers.learner.data.row_checks import DIFFERENCE
from shmbridge.consumers.learner.data.sources import HubSource, RankSource, may_be_data
from shmbridge.consumers.learner.data.training_rows import SaidOnce, TrainingRows
from shmbridge.consumers.learner.model.forward import evaluating
from shmbridge.consumers.learner.report.logs import MetricsLog
from shmbridge.consumers.learner.report.samples import SampleLog
from shmbridge.consumers.learner.report.step_metrics import (
    LearnerMetrics,
    StepCost,
    merged,
    of_all_ranks,
    rows_of_environments,
)
from shmbridge.consumers.learner.train.grpo_update import MISMATCH, Learner, MismatchAlarm
from shmbridge.consumers.learner.train.objective import SHARES
from shmbridge.consumers.learner.train.publishing import EnginePushes, PublishWeights
from shmbridge.consumers.learner.train.starting_point import Saver
from shmbridge.consumers.learner.world import say
from shmbridge.control.messages import Evaluated
from shmbridge.metrics import rollout_metrics

EVAL = "eval"
Hook = Callable[[int, Any, Any], Mapping[str, float]]  # step, model, tokenizer -> numbers by name


class BrokenStep(Exception):
    """A step could not be computed.

    Attributes:
        details: the traceback; "" if memory ran out.
    """

    details = ""


def broken_step(
    error: Exception, compute: ComputeConfig, learner: Learner, rescue: Callable[[], str]
) -> BrokenStep:
    """Saves what was trained and returns the error to report. Blocks for the disk.

    Args:
        error: the original exception; its frames in the computation are cleared.
        compute: of the configuration.
        learner: the learner that was training.
        rescue: saves, and returns what is on disk: `Saver.rescue`.
    """
    notes = getattr(error, "__notes__", [])
    what, step = "; ".join([(str(error).splitlines() or [""])[0], *notes]), learner.step + 1
    details = "" if lacks_memory(error) else "".join(traceback.format_exception(error))
    free_activations(error)
    for free in (learner.drop_gradient, torch.cuda.empty_cache):
        # a broken device raises at each call; report the first error
        with suppress(RuntimeError):
            free()
    saved = rescue()
    if lacks_memory(error):
        place = "the update" if not learner.consistent else "forward or backward"
        found = BrokenStep(
            f"out of memory in {place} of step {step}: {what}; {saved} -> {_lower(compute, learner)}, then "
            "--resume"
        )
    else:
        found = BrokenStep(
            f"step {step} broke off: {type(error).__name__}: {what}; {saved} -> the batch comes again with "
            "--resume"
        )
    found.details = details
    return found


def free_activations(error: Exception) -> None:
    """Clears the frames of the computation, which hold the activations.

    The calling frames still hold the batch; it is not released and is redelivered.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not Learner.accumulate.__globals__:
        trace = trace.tb_next
    traceback.clear_frames(trace)


def is_of_device(error: BaseException) -> bool:
    """Returns whether an error leaves the device useless for this process: every later call fails, too."""
    return not lacks_memory(error) and (
        "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
    )


def _lower(compute: ComputeConfig, learner: Learner) -> str:
    """Returns the options that would save memory and are not in use yet."""
    if not learner.consistent:
        return "--param-dtype bfloat16, --lora-rank, or --parallel fsdp2 on more GPUs"
    now = learner.objective.micro_tokens  # halved, down to the longest row, in a run of one process
    ways = [f"lower --micro-tokens ({now} now)"] if now == compute.micro_tokens else []
    if not compute.gradient_checkpointing:
        ways.append("give --gradient-checkpointing")
    if compute.precision == "float32":
        ways.append("--precision bfloat16")
    ways = ways or ["--max-token-len with --leave-out-long-rows, or --param-dtype bfloat16"]
    return " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)


class EarlyStop:
    """Reads every step's metrics and decides when the run may end.

    A step where the metric is absent or unknown is skipped.

    Args:
        condition: must hold in `patience` consecutive steps; None: no condition.
        patience: the number of steps.
        goal: the metric that must improve within `stall` steps; None: no goal.
        stall: the number of steps.
        say: prints a line for the user: warns of a metric name that the first step does not have.
    """

    def __init__(
        self,
        condition: Condition | None,
        patience: int = 1,
        goal: Goal | None = None,
        stall: int = 1,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._condition, self._patience = condition, patience
        self._goal, self._stall = goal, stall
        self._held = 0
        self._best: float | None = None
        self._since_best = 0
        self._say = say
        self._unseen = {each.metric for each in (condition, goal) if each is not None}

    def reason(self, metrics: Metrics) -> str | None:
        """Returns why to stop after a step with these metrics; None to continue."""
        for name in sorted(self._unseen - metrics.keys()):
            self._say(
                f"no metric {name} in the first step: until there is one, it does not end this run early"
            )
        self._unseen = set()
        return self._good_enough(metrics) or self._no_better(metrics)

    def _good_enough(self, metrics: Metrics) -> str | None:
        condition = self._condition
        if condition is None or (value := _known(metrics, condition.metric)) is None:
            return None
        self._held = self._held + 1 if condition.holds(value) else 0
        if self._held < self._patience:
            return None
        return f"{condition} in {self._patience} steps one after the other, {value:g} in the last"

    def _no_better(self, metrics: Metrics) -> str | None:
        goal = self._goal
        if goal is None or (value := _known(metrics, goal.metric)) is None:
            return None
        if self._best is None or (value > self._best if goal.largest else value < self._best):
            self._best, self._since_best = value, 0
            return None
        self._since_best += 1
        if self._since_best < self._stall:
            return None
        return f"{goal.metric} has not become better than {self._best:g} in {self._stall} steps"


def _known(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


class BadHook(Refusal):
    """The evaluation hook cannot be used; the message says why."""


class TrainingScreen:
    """The `Consumer.screen` callback: scores evaluation groups, keeps out those that the checkpoint contains.

    Called in the thread that forms batches; `metrics` is for the training thread.

    Attributes:
        reported: returns what environments have measured in evaluations of their own, each once.
    """

    def __init__(self, consumed: Consumed) -> None:
        self.reported: Callable[[], Sequence[Evaluated]] = tuple
        self._consumed = consumed
        self._lock = threading.Lock()
        # (environment, group, score) since the last call of `metrics`
        self._scores: list[tuple[str, int, float]] = []
        self._groups = 0
        self._groups_total = 0
        self._known_total = 0

    def __call__(self, group: Any) -> bool:
        """Returns False for a group that the checkpoint contains. Never blocks."""
        metas = [record.meta for record in group.records]
        if metas[0].split == EVAL:
            scores = [score for record in group.records for score in _record_scores(record)]
            with self._lock:
                self._scores += [(metas[0].env_name, self._groups_total, score) for score in scores]
                self._groups += 1
                self._groups_total += 1
            return True  # the consumer leaves it out, and counts it
        if all(self._consumed.contains(meta) for meta in metas):
            with self._lock:
                self._known_total += 1
            return False
        return True

    def metrics(self) -> Metrics:
        """Returns `eval/...` metrics of the groups since the last call, and totals. Never blocks for long."""
        with self._lock:
            scores, self._scores, groups, self._groups = self._scores, [], self._groups, 0
            totals: Metrics = {
                "eval/groups_total": self._groups_total,
                "resume/known_groups_total": self._known_total,
            }
        if not groups:
            return totals | evaluation_metrics(self.reported(), totals)
        found = rollout_metrics(
            [env for env, _, _ in scores], [n for _, n, _ in scores], [s for _, _, s in scores]
        )
        for name, value in found.items():
            if name.count("/") == 2:  # of one environment
                totals[name.replace("atropos/", "eval/", 1)] = value
        totals |= {
            "eval/mean_score": found["atropos/mean_score"],
            "eval/groups": groups,
            "eval/trajectories": len(scores),
        }
        return totals | evaluation_metrics(self.reported(), totals)


class EvalHook:
    """Calls the user's function every so many steps; a failure is printed, counted, and else ignored."""

    def __init__(self, function: Hook, every: int, say: Callable[[str], None]) -> None:
        self._function, self._every, self._say = function, every, say
        self.failures_total = 0

    def is_due(self, step: int) -> bool:
        """Returns whether to call the function after this step."""
        return step % self._every == 0

    def called(self, step: int, model: Any, tokenizer: Any) -> Metrics:
        """Calls the function; returns its numbers under `eval/`, none if it fails. Blocks as long as it."""
        try:
            said = self._function(step, model, tokenizer)
            return {f"eval/{name}": float(value) for name, value in said.items()}
        except Exception as error:  # no failure of the hook may stop training
            self.failures_total += 1
            self._say(
                f"the evaluation hook failed at step {step}, training goes on: {type(error).__name__}: "
                f"{error}"
            )
            return {}


def load_hook(name: str) -> Hook:
    """Imports the module of `module:function` and returns the function. Raises `BadHook`."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise BadHook(f"--eval-hook {name} is not MODULE:FUNCTION -> such as my_evaluation:accuracy")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module may raise anything
        hint = f"is {module}.py in this folder, or on PYTHONPATH?"
        if module in sys.modules:
            near = difflib.get_close_matches(function, dir(sys.modules[module]), n=1)
            hint = f"did you mean {module}:{near[0]}?" if near else f"define {function} in {module}"
        raise BadHook(f"--eval-hook {name}: {type(error).__name__}: {error} -> {hint}") from error
    if not callable(found):
        raise BadHook(f"--eval-hook {name}: a {type(found).__name__} cannot be called -> name a function")
    return found  # type: ignore[no-any-return]


def _record_scores(record: Any) -> list[float]:
    """Returns one score per row; NaN where absent."""
    if "score" not in record:
        return [math.nan] * len(record)
    scores = np.array(record["score"], np.float64)
    scores[~np.isfinite(scores)] = math.nan
    if (valid := record.valid("score")) is not None:
        scores[~np.asarray(valid, bool)] = math.nan
    return [float(score) for score in scores]


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
