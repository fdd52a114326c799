"""The GSM8K example with stand-ins for its downloads, and vLLM as in its file, which loads new versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge

ROOT = Path(__file__).parents[3]
STEPS = 6


@pytest.mark.timeout(500)
def test_vllm_follows_the_learner_of_the_example(learner_python, tmp_path):
    folder = tmp_path / f"gsm8k-vllm-{os.getpid()}"
    words = [str(ROOT / "examples/gsm8k/stand_in.py"), str(folder), "--steps", str(STEPS)]
    words += ["--engine", "vllm", "--engine-python", sys.executable]
    run(learner_python, words, 100)
    try:
        run(learner_python, ["-m", "shmbridge.cli", "launch", str(folder / "launch.yaml")], 400)
    finally:
        shmbridge.clean(f"stand-in-{folder.name}", dry_run=False)
    loaded = re.findall(r"policy version (\d+): paused", (folder / "run/logs/vllm.log").read_text())
    assert str(STEPS) in loaded
    steps = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    assert all(step["trajectories"] == 64 for step in steps)


def run(python: str, words: list[str], within_s: float) -> None:
    done = subprocess.run(
        [python, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True, text=True, timeout=within_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
