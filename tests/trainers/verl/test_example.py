"""The example as a user runs it: verl's own command, an environment beside it, a reward that rises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_reward_rises(bridge):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/verl_grpo.py"), "--steps", "10", "--bridge", bridge],
        capture_output=True, text=True, timeout=850, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    rewards = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(rewards) == 10, done.stdout + done.stderr
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
