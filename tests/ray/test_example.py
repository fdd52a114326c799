"""examples/ray_two_nodes/two_nodes.py runs as its page says, and leaves nothing."""

import re
import subprocess
import sys
from pathlib import Path

import shmbridge

EXAMPLE = Path(__file__).parents[2] / "examples/ray_two_nodes/two_nodes.py"


def test_the_environment_learns_from_the_other_node() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    bridges = re.findall(r"node \S+: (?:destination|source) of bridge (\S+)", done.stdout)
    assert len(bridges) == 2
    sampled = [int(version) for version in re.findall(r"env-1 sampled with version (\d+)", done.stdout)]
    assert sampled[-1] > 0, "it has the learner's weights"
    first, last = map(float, re.findall(r"first ten ([\d.]+), of the last ten ([\d.]+)", done.stdout)[0])
    assert last > first + 0.5
    assert "SIGTERM" not in done.stderr
    assert {each.name for each in shmbridge.list_bridges()}.isdisjoint(bridges)
