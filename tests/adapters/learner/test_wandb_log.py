"""The learner's W&B run, with the real package, offline, its file read back; its failures do not affect
training.
"""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest

from shmbridge.consumers import grpo
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.report.logs import WANDB_ID_FILE, MetricsLog, WandbMissing, WandbRun

METRICS = {
    "step": 3,
    "atropos/mean_score": 0.5,
    "atropos/math/mean_score": float("nan"),
    "update_skipped": False,
}


def options(tmp_path, *more):
    base = ["--bridge", "b", "--model", "m", "--steps", "9", "--run-dir", str(tmp_path / "run"), "--wandb"]
    return parse([*base, *more])


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Return the folder of an offline W&B."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path


def test_a_run_gets_what_the_file_gets_and_a_resumed_learner_goes_on_with_it(offline, wandb_history):
    more = ("--wandb-project", "proj", "--wandb-group", "grp", "--wandb-name", "nm")
    said = []
    for step, resumed in ((3, False), (4, True)):
        with (
            WandbRun(options(offline, *more), resumed, said.append) as run,
            MetricsLog(offline / "run" / "metrics.jsonl", run) as log,
        ):
            log.append(METRICS | {"step": step})
    rows, run = wandb_history(offline, runs=2)
    assert [row["_step"] for row in rows] == [3, 4]
    assert rows[0].items() >= {"atropos/mean_score": 0.5, "step": 3, "update_skipped": False}.items()
    assert "atropos/math/mean_score" not in rows[0]  # nothing is known of it
    assert (run.project, run.run_group, run.display_name, run.job_type) == ("proj", "grp", "nm", "learner")
    assert run.run_id == (offline / "run" / WANDB_ID_FILE).read_text()
    written = [json.loads(line) for line in (offline / "run" / "metrics.jsonl").read_text().splitlines()]
    assert written[0]["atropos/math/mean_score"] is None
    assert written[0]["wandb_failures_total"] == 0
    assert said == []


class BrokenRun:
    id = "x"

    def log(self, metrics, step):
        raise ConnectionError("no network")

    def finish(self):
        raise ConnectionError("no network")


def test_a_failing_run_is_said_once_and_counted(tmp_path, monkeypatch):
    broken = SimpleNamespace(init=lambda **_: BrokenRun(), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", broken)
    said = []
    with WandbRun(options(tmp_path), False, said.append) as run, MetricsLog(tmp_path / "m.jsonl", run) as log:
        for step in range(3):
            log.append(METRICS | {"step": step})
    assert run.failures_total == 4
    assert said == ["W&B cannot take metrics, training goes on: ConnectionError: no network"]
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["wandb_failures_total"] for line in lines] == [1, 2, 3]


def test_a_run_that_does_not_start_costs_a_line(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse, Settings=lambda **_: None))
    said = []
    with WandbRun(options(tmp_path), False, said.append) as run:
        run.log(METRICS)
    assert run.failures_total == 1
    assert "W&B cannot start" in said[0]
    assert "No API key" in said[0]


def test_the_learner_does_not_start_without_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(WandbMissing):
        WandbRun(options(tmp_path), False, print)
    flags = ["--bridge", "b", "--model", "m", "--steps", "9", "--run-dir", str(tmp_path), "--wandb"]
    assert grpo.main(flags) == 1
    assert "pip install wandb" in capsys.readouterr().err


def test_a_value_that_is_not_finite_is_not_told(tmp_path, monkeypatch):
    told = []
    run_of_ours = SimpleNamespace(
        id="x", log=lambda values, step: told.append((step, values)), finish=lambda: None
    )
    broken = SimpleNamespace(init=lambda **_: run_of_ours, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", broken)
    with WandbRun(options(tmp_path), False, print) as run:
        run.log({"step": 1, "a": math.inf, "b": 0.0, "c": math.nan, "d": None, "e": "text"})
    assert told == [(1, {"step": 1, "b": 0.0, "d": None, "e": "text"})]


def test_samples_are_a_table_with_a_row_for_each_trajectory(tmp_path, monkeypatch):
    told = []
    run_of_ours = SimpleNamespace(
        id="x", log=lambda values, step: told.append((step, values)), finish=lambda: None
    )
    package = SimpleNamespace(
        init=lambda **_: run_of_ours,
        Settings=lambda **_: None,
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    row = {"completion": "b" * 5000, "score": 1.0, "finish_reason": None, "advantages": [0.5, None, 1.0]}
    own = row | {"prompt": "its own", "advantages": [None], "completion": ""}
    sample = {"step": 7, "env_name": "math", "group_id": "g", "prompt": "a", "trajectories": [row, own]}
    with WandbRun(options(tmp_path), False, print) as run:
        run.log_samples([])
        run.log_samples([sample])
    ((step, values),) = told
    first, second = values["samples"]
    assert step == first["step"] == 7
    assert (first["prompt"], len(first["completion"]), first["mean_advantage"]) == ("a", 4000, 0.75)
    assert (second["prompt"], second["mean_advantage"]) == ("its own", None)
