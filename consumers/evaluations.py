"""What environments measured in evaluations of their own: a file of the run, and metrics of a step.

Needs no torch.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from shmbridge.control.messages import Evaluated
from shmbridge.metrics import environment_label

log = logging.getLogger(__name__)

FILE = "evaluations.jsonl"
_MOST_UNTAKEN = 256


class EvaluationLog:
    """Appends evaluations to a file, a line each, and keeps the newest 256 until they are taken. Any thread.

    Args:
        path: made with its folder when the first one comes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()  # a trainer may change its directory
        # A signal handler that interrupts `note` may close the feed, which notes the last ones.
        self._lock = threading.RLock()
        self._untaken: deque[Evaluated] = deque(maxlen=_MOST_UNTAKEN)
        self.unwritten = 0

    def note(self, evaluations: Iterable[Evaluated]) -> None:
        """Writes and keeps some. Blocks for the disk; what a full one does not take is counted."""
        for each in evaluations:
            line = {
                "time": time.time(),
                "env_name": each.env_name,
                "producer_id": each.producer_id,
                "step": each.step,
                "policy_version": each.policy_version,
                "metrics": each.metrics,
            }
            with self._lock:
                self._untaken.append(each)
                try:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    with self._path.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                except OSError as error:
                    self.unwritten += 1
                    log.warning(
                        "%s does not take an evaluation of %s, %s: %s",
                        *(self._path, each.env_name, each.metrics, error.strerror),
                    )

    def take(self) -> list[Evaluated]:
        """Returns those that came since the last call, in order. Never blocks for long."""
        with self._lock:
            taken = list(self._untaken)
            self._untaken.clear()
            return taken


def evaluation_metrics(evaluations: Iterable[Evaluated], there: Collection[str] = ()) -> dict[str, float]:
    """Returns `eval/{environment}/...` of what environments measured; the mean, if one did so several times.

    Never blocks. A name that is in `there`, of the scores of evaluation groups, gets `_reported` at its end.
    """
    values: dict[str, list[float]] = {}
    for each in evaluations:
        begin = f"eval/{environment_label(each.env_name)}/"
        mine = {f"{begin}{name.removeprefix('eval/')}": value for name, value in each.metrics.items()}
        mine |= {f"{begin}at_step": each.step, f"{begin}at_version": each.policy_version}
        for name, value in mine.items():
            values.setdefault(f"{name}_reported" if name in there else name, []).append(value)
        values.setdefault(f"{begin}evaluations", []).append(1.0)
    return {
        name: sum(some) if name.endswith("/evaluations") else sum(some) / len(some)
        for name, some in values.items()
    }
