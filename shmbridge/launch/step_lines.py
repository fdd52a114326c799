"""One line about the learner's newest step, from its metrics file, for who watches a launch."""

from pathlib import Path
from typing import Any

import msgspec

_MOST_BYTES = 1 << 20  # read at once; older steps than that are skipped
_OF_LINES = 20  # lines of a whole run where they do not replace each other


class NewSteps:
    """Reads what a run appends to its metrics.jsonl; what was there before is of earlier runs.

    Args:
        path: metrics.jsonl; may come later.
        steps: of the whole run; 0: unknown.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.steps = steps
        self._path = path
        self._read_to = path.stat().st_size if path.exists() else 0
        self._shown = 0

    def newest(self) -> dict[str, Any] | None:
        """Returns the metrics of the newest step since the last call; None if there is none."""
        try:
            with self._path.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self._read_to, end - _MOST_BYTES))
                text = file.read()
        except OSError:
            return None
        complete = text.rpartition(b"\n")[0]
        if not complete:
            return None
        self._read_to = end - (len(text) - len(complete) - 1)
        try:
            metrics = msgspec.json.decode(complete.rpartition(b"\n")[2])
        except msgspec.DecodeError:
            return None
        return metrics if isinstance(metrics, dict) and isinstance(metrics.get("step"), int) else None

    def is_due(self, step: int) -> bool:
        """Returns whether a line of its own is due: the first step, the last, and some twenty between."""
        every = max(1, self.steps // _OF_LINES)
        due = self._shown == 0 or step == self.steps or step // every > self._shown // every
        self._shown = step if due else self._shown
        return due


def step_line(metrics: dict[str, Any], steps: int) -> str:
    """Returns step, reward, tokens per second, the share of the step that was waiting, staleness."""
    total = _number(metrics, "step_s")  # waiting is part of it
    parts = [f"step {metrics['step']}" + (f"/{steps}" if steps else "")]
    if metrics.get("reward_mean") is not None:
        parts.append(f"reward {_number(metrics, 'reward_mean'):.3f}")
    if total > 0:
        parts.append(f"{_number(metrics, 'tokens') / total:,.0f} tokens/s")
        parts.append(f"waiting {_number(metrics, 'wait_s') / total:.0%}")
    parts.append(f"staleness {_number(metrics, 'staleness_mean'):.1f}")
    return "  ".join(parts)


def steps_of(command: list[str]) -> int:
    """Returns the steps that a learner's command line says; 0 if it says none."""
    for word, value in zip(command, [*command[1:], ""], strict=False):
        if word == "--steps" and value.isdigit():
            return int(value)
        if word.startswith("--steps=") and word[8:].isdigit():
            return int(word[8:])
    return 0


def _number(metrics: dict[str, Any], name: str) -> float:
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
