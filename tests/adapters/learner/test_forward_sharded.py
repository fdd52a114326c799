"""Chunks and experts under DDP and FSDP2: two ranks over gloo, each with rows of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def on_two_ranks(script, *words):
    """Return what each rank printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2]), env.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *words],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_values_and_gradients_are_those_of_the_model_alone():
    said = on_two_ranks("sharded_forward.py")
    assert all(each.count("equal: ") == 5 for each in said), "\n".join(said)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_experts_that_a_rank_sends_nothing_to_get_the_gradient_of_the_others(how):
    said = on_two_ranks("sharded_experts.py", how)
    assert all(each.count("equal: ") == 1 for each in said), "\n".join(said)


@pytest.mark.parametrize(
    "tied", [pytest.param([], id="untied", marks=pytest.mark.long), pytest.param(["tied"], id="tied")]
)
def test_a_rank_that_writes_no_checkpoint_gathers_nothing_for_it(tmp_path, tied):
    said = on_two_ranks("sharded_save.py", str(tmp_path), *tied)
    assert all(each.count("equal: ") == 1 for each in said), "\n".join(said)
