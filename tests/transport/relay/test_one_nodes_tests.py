"""The tests of one node, unchanged, with their producers on another node and a relay in between."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from over_relay import OF_ONE_NODE

TRANSPORT = Path(__file__).parents[1]
FEW = ("record/test_record.py", "record/test_scored_data.py")
MANY = (
    *("record", "test_batch.py", "batching/test_batching.py", "batching/test_batch_interop.py"),
    *("batching/test_policies.py", "batching/test_async_batches.py", "test_consumer.py"),
    *("test_consumer_async.py", "put/test_pack.py", "put/test_claim.py", "put/test_token_versions.py"),
    *("atropos", "test_schema.py", "ranks/test_ranks.py"),
)


def passed_over_a_relay(files: tuple[str, ...]) -> int:
    """How many passed; all did."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "over_relay",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
    ]
    done = subprocess.run(
        [*command, *(TRANSPORT / file for file in files)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted, done.stdout[-500:]
    return int(counted[1])


def test_records_are_the_same_over_a_relay():
    assert passed_over_a_relay(FEW) > 30


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tests_of_one_node_pass_over_a_relay():
    assert passed_over_a_relay(MANY) > 650


def test_what_is_left_out_exists():
    there = {
        name
        for path in TRANSPORT.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    gone = {name for names in OF_ONE_NODE.values() for name in names.split()} - there
    assert not gone
