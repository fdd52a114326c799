"""The cost of following: no CPU while no version comes, and no memory left after many versions."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from soak import MODELS, descendants, measured, soak

pytestmark = pytest.mark.timeout(420)


def test_thirty_versions_under_load_leave_nothing_behind(
    server, learner, new_versions, bridge, tiny_folder, make_model
):
    """`soak.py` does hundreds, and looks at memory, too: here the engine's cache is still being touched for
    the first time.
    """
    process, models = learner(), [make_model(seed) for seed in range(MODELS)]
    pids = {str(pid): pid for pid in descendants(server.process.pid)}
    seen = soak(
        server.url,
        lambda version: process.does("publish", version, tiny_folder(version % MODELS)),
        models,
        new_versions(30),
        lambda: measured(pids, bridge),
    )
    assert not seen["trouble"]
    assert seen["answers"] > 0
    assert not {name for name in seen["grown"] if not name.endswith("bytes") or name == "shared bytes"}


def test_following_costs_nothing_while_nothing_comes(server):
    """The whole API server's CPU; the engine's own processes follow nothing. The quietest of some
    windows counts: the server has work of its own now and then, and a machine a slow clock.
    """
    shares = []
    while len(shares) < 8 and min(shares, default=1.0) >= 0.02:
        began, cpu = time.monotonic(), cpu_s(server.process.pid)
        time.sleep(2.5)
        shares.append((cpu_s(server.process.pid) - cpu) / (time.monotonic() - began))
    assert min(shares) < 0.03, shares


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
