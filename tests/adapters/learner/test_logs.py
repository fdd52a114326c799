"""Where metrics go besides metrics.jsonl: W&B, with the real package offline, and TensorBoard; no failure of
theirs affects training.
"""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest

from shmbridge.consumers import grpo
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.report.logs import (
    WANDB_ID_FILE,
    MetricsLog,
    TensorboardLog,
    TensorboardMissing,
    WandbMissing,
    WandbRun,
)

FLAGS = ["--bridge", "b", "--model", "m", "--steps", "9", "--wandb"]
METRICS = {"step": 3, "atropos/mean_score": 0.5, "atropos/math/mean_score": math.nan, "update_skipped": False}


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def open_wandb(tmp_path):
    """Return a function that makes a W&B run in a run directory."""

    def make(*more, resumed=False, say=print):
        return WandbRun(parse([*FLAGS, "--run-dir", str(tmp_path / "run"), *more]), resumed, say)

    return make


@pytest.fixture
def stand_in(monkeypatch):
    """Return what a stand-in for the wandb package was told, by step."""
    told = []
    run = SimpleNamespace(id="x", log=lambda values, step: told.append((step, values)), finish=lambda: None)
    package = SimpleNamespace(
        init=lambda **_: run,
        Settings=lambda **_: None,
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    return told


def test_a_wandb_run_gets_what_the_file_gets_and_a_resumed_learner_goes_on_with_it(
    tmp_path, monkeypatch, open_wandb, wandb_history
):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    more, said = ["--wandb-project", "proj", "--wandb-group", "grp", "--wandb-name", "nm"], []
    file = tmp_path / "run" / "metrics.jsonl"
    for step, resumed in ((3, False), (4, True)):
        with open_wandb(*more, resumed=resumed, say=said.append) as run, MetricsLog(file, run) as log:
            log.append(METRICS | {"step": step})
    rows, run = wandb_history(tmp_path, runs=2)
    assert [row["_step"] for row in rows] == [3, 4]
    assert rows[0].items() >= {"atropos/mean_score": 0.5, "step": 3, "update_skipped": False}.items()
    assert "atropos/math/mean_score" not in rows[0]  # nothing is known of it
    assert (run.project, run.run_group, run.display_name, run.job_type) == ("proj", "grp", "nm", "learner")
    assert run.run_id == (tmp_path / "run" / WANDB_ID_FILE).read_text()
    first = lines_of(file)[0]
    assert (first["atropos/math/mean_score"], first["wandb_failures_total"]) == (None, 0)
    assert said == []


def test_a_failing_wandb_run_is_reported_once_and_counted(tmp_path, monkeypatch, open_wandb):
    def fail(*_, **__):
        raise ConnectionError("no network")

    broken = SimpleNamespace(id="x", log=fail, finish=fail)
    package = SimpleNamespace(init=lambda **_: broken, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    said = []
    with open_wandb(say=said.append) as run, MetricsLog(tmp_path / "m.jsonl", run) as log:
        for step in range(3):
            log.append(METRICS | {"step": step})
    assert run.failures_total == 4
    assert said == ["W&B cannot take metrics, training goes on: ConnectionError: no network"]
    assert [line["wandb_failures_total"] for line in lines_of(tmp_path / "m.jsonl")] == [1, 2, 3]
    package.init = fail
    with open_wandb(say=said.append) as run:
        run.log(METRICS)
    assert run.failures_total == 1
    assert said[1:] == ["W&B cannot start, training goes on: ConnectionError: no network"]


def test_the_learner_does_not_start_without_the_package(tmp_path, monkeypatch, open_wandb, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(WandbMissing):
        open_wandb()
    assert grpo.main([*FLAGS, "--run-dir", str(tmp_path)]) == 1
    assert "pip install wandb" in capsys.readouterr().err


def test_wandb_gets_finite_values_alone(open_wandb, stand_in):
    with open_wandb() as run:
        run.log({"step": 1, "a": math.inf, "b": 0.0, "c": math.nan, "d": None, "e": "text"})
    assert stand_in == [(1, {"step": 1, "b": 0.0, "d": None, "e": "text"})]


def test_samples_are_a_table_with_a_row_for_each_trajectory(open_wandb, stand_in):
    row = {"completion": "b" * 5000, "score": 1.0, "finish_reason": None, "advantages": [0.5, None, 1.0]}
    own = row | {"prompt": "its own", "advantages": [None], "completion": ""}
    sample = {"step": 7, "env_name": "math", "group_id": "g", "prompt": "a", "trajectories": [row, own]}
    with open_wandb() as run:
        run.log_samples([])
        run.log_samples([sample])
    ((step, values),) = stand_in
    first, second = values["samples"]
    assert step == first["step"] == 7
    assert (first["prompt"], len(first["completion"]), first["mean_advantage"]) == ("a", 4000, 0.75)
    assert (second["prompt"], second["mean_advantage"]) == ("its own", None)


# --- TensorBoard ------------------------------------------------------------------------------------------


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def line(step, **more):
    return {"step": step, "time": 1000.0 + step, "loss": 0.5, "bridge/held": 3, **more}


def test_tensorboard_gets_numbers_at_their_steps_and_a_resume_hides_what_comes_again(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorboardLog(tmp_path, None, say=print) as log:
        log.log(line(1, grad_norm=math.nan, update_skipped=False, words="none"))
        log.log(line(2, loss=0.25))
        log.log(line(3))
    (tmp_path / "learner.json").write_text('{"step": 1, "policy_version": 1}')
    with TensorboardLog(tmp_path, tmp_path, say=print) as log:
        log.log(line(2, loss=7.0))
    assert events(tmp_path) == {
        "learner/loss": [(1, 0.5), (2, 7.0)],
        "bridge/held": [(1, 3.0), (2, 3.0)],
        "learner/update_skipped": [(1, 0.0)],
    }


def test_a_failing_tensorboard_is_reported_once_and_counted(tmp_path):
    pytest.importorskip("tensorboard")
    said = []
    with TensorboardLog(tmp_path, None, say=said.append) as log:
        for step in (1, 2):
            log.log({"step": step, "loss": 0.5})  # no time
    assert log.failures_total == 2
    assert len(said) == 1
    assert "training goes on: KeyError" in said[0]


def test_an_error_says_how_to_get_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TensorboardMissing, match=r"pip install 'shmbridge\[tensorboard\]'"):
        TensorboardLog(tmp_path, None, say=print)
