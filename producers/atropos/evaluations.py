"""What an environment measures when it evaluates the policy: told to the consumer, with or without W&B.

`BaseEnv` has three ways to say it, and environments use any of them: the argument of `evaluate_log`, the list
`eval_metrics` that `wandb_log` empties, and what `evaluate` returns. Used by
`shmbridge.producers.atropos.patches` and `control_link`, in the environment's event loop.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from shmbridge.control.messages import LONGEST_NAME, MOST_METRICS, Evaluated

log = logging.getLogger(__name__)

_MOST_UNSENT = 16

_Method = Callable[..., Coroutine[Any, Any, Any]]
# What the running evaluation has passed to `evaluate_log`. Every task has a context of its own.
_logged: ContextVar[dict[str, float] | None] = ContextVar("metrics_of_this_evaluation", default=None)


class Evaluations:
    """The evaluations of one environment that the consumer has not heard of yet, the newest 16 at most."""

    def __init__(self, env_name: str) -> None:
        self._env_name = env_name
        self._number = 0
        self.unsent: deque[Evaluated] = deque()
        self.not_delivered: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float], producer_id: str, version: int, step: int) -> None:
        """Notes what one evaluation has measured, to be sent."""
        kept = {name: value for name, value in metrics.items() if len(name) <= LONGEST_NAME}
        kept = dict(list(kept.items())[:MOST_METRICS])
        if len(kept) < len(metrics):
            self._lose("metrics beyond what a message takes", len(metrics) - len(kept))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in list(kept.items())[:8])
        log.info("evaluation at step %d, policy version %d: %s", step, version, shown or "no numbers")
        if not kept:
            return
        self._number += 1
        name = self._env_name[:LONGEST_NAME]
        self.unsent.append(Evaluated(producer_id, name, self._number, kept, version, step))
        if len(self.unsent) > _MOST_UNSENT:
            self.unsent.popleft()
            self._lose("evaluations while no consumer answered")

    def refused(self, why: Exception) -> None:
        """Drops the oldest, which the consumer does not take."""
        self.unsent.popleft()
        self._lose(f"evaluations, refused: {why}")

    def leave(self) -> None:
        """Counts what is left at the end."""
        if self.unsent:
            self._lose("evaluations at the end", len(self.unsent))
            self.unsent.clear()

    def _lose(self, kind: str, count: int = 1) -> None:
        self.not_delivered[kind] += count
        log.warning("environment %s: %d not delivered: %s", self._env_name, count, kind)


def measured(
    evaluate: _Method, env: Any, begin: Callable[[], tuple[int, int]], add: Callable[..., None]
) -> _Method:
    """Returns `evaluate` of an environment, which then calls `add(metrics, version, step)`.

    Args:
        evaluate: the environment's own.
        env: the environment.
        begin: returns the policy version and the step now.
        add: gets what was measured.
    """

    @functools.wraps(evaluate)
    async def run(*args: Any, **kwargs: Any) -> Any:
        version, step = begin()
        found: dict[str, float] = {}
        token, before = _logged.set(found), list(_listed(env))
        try:
            result = await evaluate(*args, **kwargs)
        except Exception:  # BaseEnv reads no result of this task
            log.exception("the evaluation at step %d failed; the environment goes on", step)
            raise
        finally:
            _logged.reset(token)
        now = list(_listed(env))
        same = now[: len(before)] == before  # else `wandb_log` has emptied it meanwhile, or it was replaced
        new = now[len(before) :] if same else now
        add({**numbers(result), **numbers(dict(new)), **found}, version, step)
        return result

    return run


def logged(evaluate_log: _Method) -> _Method:
    """Returns `evaluate_log` of an environment, whose metrics are then those of the running evaluation."""

    @functools.wraps(evaluate_log)
    async def run(metrics: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := _logged.get()) is not None:
            found |= numbers(metrics)
        return await evaluate_log(metrics, *args, **kwargs)

    return run


def numbers(metrics: Any) -> dict[str, float]:
    """Returns the finite numbers of a mapping, by name; none of anything else."""
    found: dict[str, float] = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            number = float(value) if not isinstance(value, (str, bytes)) else math.nan
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            found[str(name)] = number
    return found


def _listed(env: Any) -> Iterable[tuple[str, Any]]:
    """Yields the pairs of `eval_metrics`, of the environments that have such a list."""
    listed = getattr(env, "eval_metrics", None)
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, (tuple, list)) and len(each) == 2 and isinstance(each[0], str):
            yield each[0], each[1]
