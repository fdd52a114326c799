"""The demo's curves for the docs: from logs of runs to a table and a figure, and an exit status that says
whether the goal was met.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("matplotlib")


@pytest.fixture
def docs(tmp_path):
    page = tmp_path / "docs" / "tutorials" / "demo.md"
    page.parent.mkdir(parents=True)
    page.write_text("before\n<!-- curves -->\n<!-- end of curves -->\nafter\n")
    return page.parents[1]


def a_run(folder, last):
    """Write the logs of a run whose reward rises in a line to `last` within 100 s."""
    folder.mkdir()
    for name in ("larger_digit", "echo_letters"):
        lines = [
            {"t": 1000.0 + second, "mean": min(last, last * second / 80), "n": 8} for second in range(101)
        ]
        (folder / f"rewards-{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    steps = [
        {
            "step": step,
            "time": 1000.0 + step,
            "tokens": 1500,
            "reward_mean": 0.5,
            "staleness_mean": 2.0,
            "wait_s": 0.25,
            "forward_s": 0.5,
            "backward_s": 0.25,
            "dropped_total": 0,
            "host_cpu_s_per_mtoken": 3.125,
        }
        for step in range(1, 41)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    return folder


def write_docs(docs, *runs):
    command = [sys.executable, str(ROOT / "examples" / "demo_curves.py"), "--docs", str(docs)]
    command += ["--runs", *map(str, runs)] if runs else []
    return run(*command)


def run(*command):
    quiet = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    return subprocess.run(
        command, env=os.environ | quiet, capture_output=True, text=True, timeout=60, check=False
    )


def test_runs_that_met_the_goal_stand_in_the_page(docs, tmp_path):
    ran = write_docs(docs, a_run(tmp_path / "seed-1", 0.95), a_run(tmp_path / "seed-2", 0.98))
    assert ran.returncode == 0, ran.stderr
    lines = (docs / "tutorials" / "demo.md").read_text().splitlines()
    assert lines[:2] == ["before", "<!-- curves -->"]
    assert lines[-2:] == ["<!-- end of curves -->", "after"]
    assert lines[4] == "| seed-1 | 0.053 | 0.950 | 100 s | 40 | 60,000 | 2.0 | 25% | 3.12 s |"
    assert lines[5].startswith("| seed-2 | 0.055 | 0.980 |")
    assert "host CPU per million tokens" in lines[2]
    assert b"By environment" in (docs / "figures" / "demo.svg").read_bytes()


def test_a_run_that_missed_it_is_named(docs, tmp_path):
    ran = write_docs(docs, a_run(tmp_path / "good", 0.95), a_run(tmp_path / "poor", 0.85))
    assert ran.returncode == 1
    assert "below 0.9 in the last tenth: poor" in ran.stderr


def test_a_folder_without_a_run_is_named(docs, tmp_path):
    ran = write_docs(docs, tmp_path)
    assert ran.returncode == 1
    assert str(tmp_path) in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_folder_that_holds_a_run_already_is_left_alone(docs, tmp_path):
    (tmp_path / "seed-1").mkdir()
    again = ("--seeds", "1", "--run-dir", str(tmp_path))
    ran = run(sys.executable, str(ROOT / "examples" / "demo_curves.py"), "--docs", str(docs), *again)
    assert (ran.returncode, ran.stderr) == (1, f"{tmp_path}/seed-1 exists: choose another --run-dir\n")


def test_without_runs_and_seeds_it_says_so(docs):
    ran = write_docs(docs)
    assert ran.returncode == 2
    assert "give --seeds, or --runs" in ran.stderr
