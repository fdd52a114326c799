"""The Python of docs/how-to/trl.md runs as written, its links lead somewhere, and the example trains."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge
from tests.trainers.trl.target_groups import group

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/trl.md"


def test_the_page_runs_as_written(tmp_path, monkeypatch, capsys):
    bridge = "run1"
    assert not [info for info in shmbridge.list_bridges() if info.name == bridge], "in use on this machine"
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/tiny_model.py"))["build"](tmp_path / "runs/tiny", seed=3)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    try:
        with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
            for number in range(4):
                made = group(number)
                producer.put(made | {"tokens": [row % 28 for row in made["tokens"]]})  # its vocabulary
            exec(compile(block, str(PAGE), "exec"), scope)
    finally:
        scope.clear()
        report = shmbridge.clean(bridge, dry_run=False)
    assert "16.0 rows trained" in capsys.readouterr().out
    assert not report.kept


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert links
    assert all((PAGE.parent / link).exists() for link in links)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [6, pytest.param(40, marks=pytest.mark.long)])
def test_the_example_trains_from_a_live_environment(steps):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/trl_grpo.py"), "--steps", str(steps)],
        capture_output=True, text=True, timeout=590, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"{32 * steps} rows of {4 * steps} groups trained" in done.stdout
    first, last = map(float, re.findall(r"steps (\d\.\d\d), of the last (\d\.\d\d)", done.stdout)[0])
    assert steps < 40 or last > first + 0.3
