"""A short run of kill_fuzz.py for every number of producers: nothing lost, doubled, torn or left behind."""

import pytest
from short_run import run_until


def enough(tally):
    counts = tally["counts"]
    return (
        counts.get("producer_kills", 0) >= 8
        and counts.get("consumer_kills", 0) >= 2
        and counts["records"] > 500
        and tally["quiet_points"] >= 3
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("producers", [1, 2, 4, 8, 16])
def test_kill_fuzz(producers):
    run_until(enough, "kill_fuzz.py", "--seed", producers, "--producers", producers, "--json", seconds=4)
