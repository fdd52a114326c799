"""What environments measured in their own evaluations, until the consumer's program takes it."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque

from shmbridge.control.messages import BAD_VALUE, LONGEST_NAME, MOST_METRICS, Evaluated, Refused

MOST_KEPT = 256
_MOST_PRODUCERS = 4096  # of which the last evaluation is known


class Evaluations:
    """The evaluations that nobody has taken yet, the newest `MOST_KEPT` at most. Any thread; never blocks.

    Args:
        lock: one that the close of a consumer knows of, so that a signal handler within `take` may close it.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._kept: deque[Evaluated] = deque()
        self._last: OrderedDict[str, int] = OrderedDict()  # producer id -> number of its newest
        self._noted = self._lost = 0

    def note(self, evaluation: Evaluated) -> None:
        """Keeps one; does nothing for one that came before. The oldest one makes room."""
        producer_id = evaluation.producer_id
        with self._lock:
            if self._last.get(producer_id, -1) >= evaluation.number:
                return
            self._last[producer_id] = evaluation.number
            self._last.move_to_end(producer_id)
            if len(self._last) > _MOST_PRODUCERS:
                self._last.popitem(last=False)
            self._noted += 1
            self._kept.append(evaluation)
            if len(self._kept) > MOST_KEPT:
                self._kept.popleft()
                self._lost += 1

    def take(self) -> list[Evaluated]:
        """Returns those that came since the last call, in order."""
        with self._lock:
            taken, self._kept = list(self._kept), deque()
            return taken

    def stats(self) -> dict[str, float]:
        """Returns the counters, flat."""
        return {"evaluations_total": self._noted, "evaluations_lost_total": self._lost}


def fault_of(evaluation: Evaluated) -> Refused | None:
    """Returns the refusal of an evaluation that is too large, or has a number that is none."""
    names = [evaluation.env_name, evaluation.producer_id, *evaluation.metrics]
    if len(evaluation.metrics) > MOST_METRICS:
        fault = f"{len(evaluation.metrics)} metrics, at most {MOST_METRICS} are kept"
    elif long := [name for name in names if len(name) > LONGEST_NAME]:
        fault = f"a name of {len(long[0])} characters, at most {LONGEST_NAME} are kept"
    elif odd := [name for name, value in evaluation.metrics.items() if not math.isfinite(value)]:
        fault = f"{odd[0]!r} is {evaluation.metrics[odd[0]]}"
    else:
        return None
    return Refused(
        BAD_VALUE,
        f"cannot keep an evaluation of {evaluation.env_name[:40]!r}: {fault}",
        "report fewer metrics",
    )
