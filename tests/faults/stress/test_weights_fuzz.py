"""A short run of weights_fuzz.py: no reader sees a version that is torn, mixed or half there, and nothing is
left behind.
"""

import pytest
from short_run import run


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1, 2])
def test_weights_fuzz(seed):
    code, tally, said = run("weights_fuzz.py", "--seconds", 5, "--seed", seed)
    assert code == 0, said
    assert tally["kills"]["writer"] >= 8, "this was no fuzz: " + said
    assert min(tally[name] for name in ("published", "changed_only", "filled", "leases", "copies")) >= 20, (
        "this was no fuzz: " + said
    )
