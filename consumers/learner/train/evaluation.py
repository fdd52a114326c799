"""Evaluation during training: the scores of evaluation groups, and the user's hook function."""

from __future__ import annotations

import difflib
import importlib
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shmbridge.consumers.evaluations import evaluation_metrics
from shmbridge.consumers.learner.checkpoint import Consumed
from shmbridge.consumers.learner.types import Metrics, Refusal
from shmbridge.control.messages import Evaluated
from shmbridge.metrics import rollout_metrics

EVAL = "eval"
Hook = Callable[[int, Any, Any], Mapping[str, float]]  # step, model, tokenizer -> numbers by name


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
            scores = [score for record in group.records for score in _scores(record)]
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


def _scores(record: Any) -> list[float]:
    """Returns one score per row; NaN where absent."""
    if "score" not in record:
        return [math.nan] * len(record)
    scores = np.array(record["score"], np.float64)
    scores[~np.isfinite(scores)] = math.nan
    if (valid := record.valid("score")) is not None:
        scores[~np.asarray(valid, bool)] = math.nan
    return [float(score) for score in scores]
