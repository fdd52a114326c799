"""A short run of weights_fuzz.py: no reader sees a version that is torn, mixed or half there, and nothing is
left behind.
"""

import pytest
from short_run import run_until


def enough(tally):
    seen = ("published", "changed_only", "filled", "leases", "copies")
    return tally["kills"]["writer"] >= 8 and min(tally[name] for name in seen) >= 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_weights_fuzz(seed):
    run_until(enough, "weights_fuzz.py", "--seed", seed, seconds=5)
