"""Merges the metrics of all ranks' shares into those of the whole batch.

Counts are summed, the first text is kept, means are weighted by their counts, standard deviations are pooled.
Percentiles cannot be merged, so the highest of any rank is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from shmbridge.consumers.learner import Metrics
from shmbridge.consumers.learner.world import World

_HIGHEST = re.compile(r"_max$|_max_fresh$|_max_s$|_max_abs$|_p\d+$|_p\d+_ms$")
_COUNTED = re.compile(
    r"^atropos/(batch_groups|total_sequences|empty_response_count)$|^host_cpu_s$|^api_perf/(\w+_per_sec|slow_requests)$"
)
_OF_TOKENS = re.compile(r"^advantage_|^token_")
_DEVIATION = re.compile(r"^(\w+_)std()$|^(atropos/.+/)std(_\w+)$")
_OF_SCORES = re.compile(r"^reward_(mean|std)$|^atropos/mean_score$")
_OF_ENVIRONMENT = re.compile(r"^(atropos/.+/)(?:mean|std)_(score|advantage)$")
# the metric that counts trajectories with a score, and with an advantage
_COUNTS = {"score": "trajectories_scored", "advantage": "trajectories_trained"}
_OF_GROUPS = {"atropos/identical_score_rate": "groups_scored", "bridge/group_wait_s": "groups"}


def of_all_ranks(world: World, share: Metrics, rows: dict[str, int]) -> Metrics:
    """Returns the metrics of the whole batch, on every rank; arguments of this rank, as `merged`."""
    said = world.all_gather([share, rows])
    return merged([each[0] for each in said], [each[1] for each in said])


def merged(shares: Sequence[Metrics], rows: Sequence[dict[str, int]]) -> Metrics:
    """Returns the metrics of the whole batch.

    Args:
        shares: of each rank; a rank may lack a name.
        rows: of each rank, the number of trajectories by the environment's name in metrics.
    """
    if len(shares) == 1:
        return dict(shares[0])
    names = dict.fromkeys(name for share in shares for name in share)
    means = {name: _merged(name, shares) for name in names}
    found = {name: _spread(name, shares, means) if _mean_of(name) else value for name, value in means.items()}
    if "atropos/num_environments" in found:
        found["atropos/num_environments"] = float(len({env for each in rows for env in each}))
    return found


def _merged(name: str, shares: Sequence[Metrics]) -> Any:
    values = [share[name] for share in shares if name in share]
    if _HIGHEST.search(name):
        return max(values)
    if isinstance(values[0], str):
        return values[0]
    if isinstance(values[0], bool):
        return any(values)
    if isinstance(values[0], int) or _COUNTED.search(name):
        return sum(values)
    return _weighted([(_weight(name, share), share[name]) for share in shares if name in share])


def _spread(name: str, shares: Sequence[Metrics], means: Metrics) -> float:
    """Returns the pooled standard deviation: within the shares and between their means."""
    mean = _mean_of(name)
    squares = [
        (_weight(name, share), share[name] ** 2 + share[mean] ** 2) for share in shares if name in share
    ]
    return math.sqrt(max(0.0, _weighted(squares) - means[mean] ** 2))


def _mean_of(name: str) -> str:
    """Returns the name of the mean that belongs to a standard deviation; "" if the name is not one."""
    found = _DEVIATION.search(name)
    return "mean".join(part for part in found.groups() if part is not None) if found else ""


def _weight(name: str, share: Metrics) -> float:
    """Returns the number of values behind a share's mean."""
    if (of := _OF_ENVIRONMENT.search(name)) is not None:
        count = of[1] + _COUNTS[of[2]]
    elif name == "token_staleness_mean":
        return float(share.get("trained_tokens", 0) - share.get("tokens_without_version", 0))
    elif _OF_SCORES.search(name):
        count = "trajectories_scored"
    else:
        count = _OF_GROUPS.get(name, "trained_tokens" if _OF_TOKENS.search(name) else "trajectories")
    return float(share.get(count, 0))


def _weighted(values: Sequence[tuple[float, float]]) -> float:
    """Returns the weighted mean of (weight, value) pairs without NaN; the plain mean if all weights are 0."""
    known = [(weight, value) for weight, value in values if math.isfinite(value)]
    if not known:
        return float("nan")
    total = sum(weight for weight, _ in known)
    if total == 0:
        return sum(value for _, value in known) / len(known)
    return sum(weight * value for weight, value in known) / total
