"""One episode of five hangs: groups come at the rate of a control whose sick episodes fail instead."""

import os

import pytest

from tests.environments.rollout.steady_rate import CONCURRENCY, measured


async def test_hung_episodes_cost_no_more_than_failing_ones():
    seen = await measured(f"steady{os.getpid()}", deadline_s=0.5, window_s=3.0, windows=2)
    assert sum(each["rows"] for each in seen) >= 0.9 * sum(each["control"] for each in seen)


@pytest.mark.long
async def test_every_window_has_the_rate_and_memory_tickets_and_tasks_stay():
    seen = await measured(f"steady{os.getpid()}", deadline_s=0.5, window_s=6.0, windows=10)
    for each in seen:
        assert each["rows"] >= 0.9 * each["control"]  # which the machine slows down as well
        assert each["tickets"] <= CONCURRENCY
        assert each["tasks"] <= seen[0]["tasks"] + 2 * CONCURRENCY
    assert seen[-1]["resident_bytes"] - seen[1]["resident_bytes"] < 8 << 20
