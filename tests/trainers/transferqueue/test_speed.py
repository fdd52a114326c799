"""Both backends in one Ray cluster, in turn: bench/transfer_queue_backends.py."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.timeout(300)
def test_values_in_shared_memory_are_faster_than_through_sockets():
    """The ratios are printed; only a get, a view, has a margin that no load hides."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}
    argv = [sys.executable, "-m", "shmbridge.bench.transfer_queue_backends", "--rounds", "15", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ratio = json.loads(done.stdout.splitlines()[-1])["ratio"]
    print(ratio)
    assert ratio["get"] > 1.5
    assert ratio["put + get + read"] > 1
