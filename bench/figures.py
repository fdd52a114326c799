"""A plan, measured in turn with its limit, and its figures.

Medians of its rounds, their spread, the ratio to the limit of the same run, CPU per group and per token. For
suites and command alike.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from shmbridge.bench.contract import Plan
from shmbridge.bench.session import Round, Session, limit_of

Figures = dict[str, Any]
# (what is timed, what comes before each, how often)
Repeat = Callable[[Callable[[], None], Callable[[], None], int], None]


def in_turn(timed: Callable[[], None], before: Callable[[], None], rounds: int) -> None:
    """One after the other, without pytest."""
    for _ in range(rounds):
        before()
        timed()


def measure(
    plan: Plan,
    *,
    seconds: float,
    rounds: int,
    count: int | None = None,
    filled_first: bool = False,
    repeat: Repeat = in_turn,
) -> Figures:
    """Rounds of about `seconds` (or of `count` groups), each after a round of the limit for the same bytes.

    Starts and ends all processes.

    With `filled_first` all groups of a round are in the lane before the first is taken.
    """
    done: list[Round] = []
    of_limit: list[Round] = []
    with Session(limit_of(plan)) as limit, Session(plan) as session:
        limit_count = limit.warm(seconds / 2)
        groups = (
            session.warm(seconds) if count is None else session.round(count, filled_first=filled_first).count
        )
        repeat(
            lambda: done.append(session.round(groups, filled_first=filled_first)),
            lambda: of_limit.append(limit.round(limit_count)),
            rounds,
        )
    return figures(plan, done, of_limit)


def figures(plan: Plan, rounds: Sequence[Round], limit: Sequence[Round]) -> Figures:
    """One flat mapping for a table, a JSON file or a plot; rates are per second, sizes in bytes, CPU in
    microseconds or as named.
    """
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
        "producers_share_cores": plan.producers > len(plan.cores.producers)
        or plan.cores.consumer in plan.cores.producers,
        "lane_bytes": plan.lane_bytes,
        "take": plan.take,
        "look": plan.look,
        "checksum": plan.checksum,
        "stores": plan.stores,
        "rounds": len(rounds),
        "groups_per_round": rounds[0].count,
        "seconds_per_group": [1 / each for each in rates],
        "groups_per_s": rate,
        "groups_per_s_range": [min(rates), max(rates)],
        "tokens_per_s": rate * tokens,
        "mb_per_s": rate * plan.shape.bytes / 1e6,
        "limit_groups_per_s": statistics.median(limits),
        "limit_mb_per_s": statistics.median(limits) * plan.shape.bytes / 1e6,
        # neighbours in time
        "of_limit": statistics.median(mine / its for mine, its in zip(rates, limits, strict=True)),
        "producer_cpu_us_per_group": 1e6 * producer,
        "consumer_cpu_us_per_group": 1e6 * consumer,
        "cpu_s_per_million_tokens": 1e6 * (producer + consumer) / tokens,
    }
