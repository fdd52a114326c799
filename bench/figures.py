"""What is said of a measurement: medians of its rounds, their spread, the ratio to the limit of the same run, CPU per group and token."""

import statistics
from collections.abc import Sequence
from typing import Any

from shmbridge.bench.contract import Plan
from shmbridge.bench.session import Round


def figures(plan: Plan, rounds: Sequence[Round], limit: Sequence[Round]) -> dict[str, Any]:
    """One flat mapping for a table, a JSON file or a plot; rates are per second, sizes in bytes, CPU in microseconds or as named."""
    rates = [each.count / each.seconds for each in rounds]
    limits = [each.count / each.seconds for each in limit]
    rate, tokens = statistics.median(rates), plan.shape.tokens
    producer = statistics.median(each.producer_cpu_s / each.count for each in rounds)
    consumer = statistics.median(each.consumer_cpu_s / each.count for each in rounds)
    return {
        "contender": plan.contender,
        "form": plan.form,
        "rows": plan.shape.rows,
        "length": plan.shape.length,
        "group_bytes": plan.shape.bytes,
        "producers": plan.producers,
        "producers_share_cores": plan.producers > len(plan.cores.producers) or plan.cores.consumer in plan.cores.producers,
        "lane_bytes": plan.lane_bytes,
        "take": plan.take,
        "look": plan.look,
        "checksum": plan.checksum,
        "rounds": len(rounds),
        "groups_per_round": rounds[0].count,
        "groups_per_s": rate,
        "groups_per_s_range": [min(rates), max(rates)],
        "tokens_per_s": rate * tokens,
        "mb_per_s": rate * plan.shape.bytes / 1e6,
        "limit_groups_per_s": statistics.median(limits),
        "limit_mb_per_s": statistics.median(limits) * plan.shape.bytes / 1e6,
        "of_limit": rate / statistics.median(limits),
        "producer_cpu_us_per_group": 1e6 * producer,
        "consumer_cpu_us_per_group": 1e6 * consumer,
        "cpu_s_per_million_tokens": 1e6 * (producer + consumer) / tokens,
    }
