"""TensorBoard gets each step's numbers under their names; its failures do not affect training."""

from __future__ import annotations

import builtins
import math

import pytest

pytest.importorskip("tensorboard")

from shmbridge.consumers.learner.report.logs import TensorboardLog, TensorboardMissing


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def line(step, **more):
    return {"step": step, "time": 1000.0 + step, "loss": 0.5, "bridge/held": 3, **more}


def test_numbers_are_written_at_their_steps(tmp_path):
    with TensorboardLog(tmp_path, None, say=print) as log:
        log.log(line(1, grad_norm=math.nan, update_skipped=False, words="none"))
        log.log(line(2, loss=0.25))
    assert read(tmp_path) == {
        "learner/loss": [(1, 0.5), (2, 0.25)],
        "bridge/held": [(1, 3.0), (2, 3.0)],
        "learner/update_skipped": [(1, 0.0)],
    }


def test_a_resumed_learner_hides_the_steps_that_come_again(tmp_path):
    with TensorboardLog(tmp_path, None, say=print) as log:
        for step in (1, 2, 3):
            log.log(line(step))
    (tmp_path / "learner.json").write_text('{"step": 1, "policy_version": 1}')
    with TensorboardLog(tmp_path, tmp_path, say=print) as log:
        log.log(line(2, loss=7.0))
    assert read(tmp_path)["learner/loss"] == [(1, 0.5), (2, 7.0)]


def test_trouble_is_said_once_and_counted(tmp_path, monkeypatch):
    lines = []
    with TensorboardLog(tmp_path, None, say=lines.append) as log:
        monkeypatch.setattr(log._writer, "add_scalar", lambda *args, **more: 1 / 0)
        log.log(line(1))
        log.log(line(2))
    assert log.failures_total == 2
    assert len(lines) == 1
    assert "training goes on: ZeroDivisionError" in lines[0]


def test_an_error_says_how_to_get_the_missing_package(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **more):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(TensorboardMissing, match=r"pip install 'shmbridge\[tensorboard\]'"):
        TensorboardLog(tmp_path, None, say=print)
