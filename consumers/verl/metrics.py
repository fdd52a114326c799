"""What a step's groups looked like, under the seed recipe's names `atropos/...`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shmbridge.consumers.trajectories import Trajectory

__all__ = ["VERSION", "GroupSummary", "atropos_metrics", "summary_of"]

VERSION = "shmbridge/weights_version"  # of the version that the checkpoint engine has written


@dataclass(frozen=True)
class GroupSummary:
    """Numbers of one group; advantages are those of trained tokens."""

    env_name: str
    scores: tuple[float, ...]
    rows: int
    advantage_sum: float
    trained_tokens: int
    empty_rows: int  # rows in which nothing is trained


def summary_of(rows: Sequence[Trajectory]) -> GroupSummary:
    """Returns the numbers of one group's rows, at least one. Never blocks."""
    return GroupSummary(
        env_name=rows[0].meta.env_name,
        scores=tuple(row.score for row in rows if row.score is not None),
        rows=len(rows),
        advantage_sum=float(sum(row.advantages[row.trained].sum(dtype=np.float64) for row in rows)),
        trained_tokens=sum(int(row.trained.sum()) for row in rows),
        empty_rows=sum(not row.trained.any() for row in rows),
    )


def atropos_metrics(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Returns metrics of the groups of a step; none for no groups. Never blocks."""
    if not groups:
        return {}
    rows = sum(group.rows for group in groups)
    scores = [score for group in groups for score in group.scores]
    alike = [group for group in groups if len(group.scores) > 1 and len(set(group.scores)) == 1]
    names = sorted({group.env_name for group in groups})
    metrics = {
        "atropos/batch_groups": len(groups),
        "atropos/total_sequences": rows,
        "atropos/num_environments": len(names),
        "atropos/identical_score_rate": len(alike) / len(groups),
        "atropos/avg_response_length": sum(group.trained_tokens for group in groups) / rows,
        "atropos/empty_response_count": sum(group.empty_rows for group in groups),
    }
    if scores:
        metrics["atropos/mean_score"] = float(np.mean(scores))
    for name in names:
        metrics[f"atropos/{name}/mean_advantage"] = _mean_advantage(g for g in groups if g.env_name == name)
    return metrics


def _mean_advantage(groups: Iterable[GroupSummary]) -> float:
    listed = list(groups)
    return sum(g.advantage_sum for g in listed) / max(sum(g.trained_tokens for g in listed), 1)
