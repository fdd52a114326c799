"""A short run of weights_fuzz.py: no reader sees a version that is torn, mixed or half there, and nothing is
left behind.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge

SCRIPT = Path(__file__).with_name("weights_fuzz.py")
PACKAGE = Path(shmbridge.__file__).parents[1]


@pytest.mark.parametrize("seed", [1, 2])
def test_weights_fuzz(seed):
    argv = [sys.executable, str(SCRIPT), "--seconds", "5", "--seed", str(seed)]
    done = subprocess.run(
        argv,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    tally = json.loads(done.stdout.splitlines()[-1])
    assert tally["kills"]["writer"] >= 8, "this was no fuzz: " + said
    assert min(tally[name] for name in ("published", "changed_only", "filled", "leases", "copies")) >= 20, (
        "this was no fuzz: " + said
    )
