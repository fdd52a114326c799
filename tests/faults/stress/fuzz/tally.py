"""The result of a run: one line for people, one object for programs. Knows numbers only."""

import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .referee import VIOLATIONS

_WORDS = {
    "lost": "lost",
    "unmarked": "duplicated without mark",
    "came_again": "came again after release",
    "wrongly_marked": "wrongly marked",
    "torn": "torn",
    "out_of_order": "out of order",
    "phantom": "never put",
    "miscounted": "miscounted",
    "leaked": "leaked",
    "failed": "failed",
}


@dataclass
class Tally:
    """The tally of one run. Times in milliseconds; `ratios`: records per second of a producer that was
    spared, with others killed over without.
    """

    seed: int
    producers: int
    seconds: float = 0.0
    cpu_s: float = 0.0  # of all processes together
    counts: Counter[str] = field(default_factory=Counter)
    detection_ms: list[float] = field(default_factory=list)
    memory_back_ms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    quiet_points: int = 0

    @property
    def violations(self) -> int:
        return sum(self.counts[name] for name in VIOLATIONS)

    def line(self) -> str:
        """Everything, two spaces apart."""
        counts = self.counts
        parts = [
            f"records {counts['records']:,}",
            f"producer kills {counts['producer_kills']:,}",
            f"consumer kills {counts['consumer_kills']:,}",
            f"stops {counts['stops']:,}",
            f"redelivered {counts['redelivered']:,}",
            *(f"{words} {counts[name]:,}" for name, words in _WORDS.items()),
            f"detection p50/max {_p50_max(self.detection_ms)} ms",
            f"memory back p50/max {_p50_max(self.memory_back_ms)} ms",
            f"ratio {_p50_range(self.ratios)}",
            f"quiet points {self.quiet_points}",
            f"producers {self.producers}",
            f"{self.seconds:.0f} s",
            f"cpu {self.cpu_s:.0f} s",
            f"seed {self.seed}",
        ]
        return "  ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "counts": dict(sorted(self.counts.items())), "violations": self.violations}


def _p50_max(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}/{max(values):.1f}" if values else "-"


def _p50_range(values: list[float]) -> str:
    return f"p50 {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"
