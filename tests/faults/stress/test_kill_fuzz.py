"""A short run of kill_fuzz.py for every number of producers: nothing lost, doubled, torn or left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge

SCRIPT = Path(__file__).with_name("kill_fuzz.py")
PACKAGE = Path(shmbridge.__file__).parents[1]


@pytest.mark.parametrize("producers", [1, 2, 4, 8, 16])
def test_kill_fuzz(producers):
    argv = [
        sys.executable,
        str(SCRIPT),
        "--seconds",
        "4",
        "--seed",
        str(producers),
        "--producers",
        str(producers),
        "--json",
    ]
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
    assert tally["violations"] == 0, said
    counts = tally["counts"]
    assert counts["producer_kills"] >= 8, "this was no fuzz: " + said
    assert counts["consumer_kills"] >= 2, "this was no fuzz: " + said
    assert counts["records"] > 500, "this was no fuzz: " + said
    assert tally["quiet_points"] >= 3, said
