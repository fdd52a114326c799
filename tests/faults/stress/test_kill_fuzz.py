"""A short run of kill_fuzz.py for every number of producers: nothing lost, doubled, torn or left behind."""

import pytest
from short_run import run


@pytest.mark.timeout(180)
@pytest.mark.parametrize("producers", [1, 2, 4, 8, 16])
def test_kill_fuzz(producers):
    flags = ("--seconds", 4, "--seed", producers, "--producers", producers, "--json")
    code, tally, said = run("kill_fuzz.py", *flags)
    assert (code, tally["violations"]) == (0, 0), said
    counts = tally["counts"]
    assert counts["producer_kills"] >= 8, "this was no fuzz: " + said
    assert counts["consumer_kills"] >= 2, "this was no fuzz: " + said
    assert counts["records"] > 500, "this was no fuzz: " + said
    assert tally["quiet_points"] >= 3, said
