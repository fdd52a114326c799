"""Times of a step's phases: they add up, and are taken once."""

from __future__ import annotations

import time

import pytest
import torch

from shmbridge.consumers.learner.report import step_metrics
from shmbridge.consumers.learner.report.step_metrics import StepCost, StepTimes


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose first entry is the time."""
    now = [100.0]
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: now[0])
    return now


def test_phases_add_up_and_are_taken_once(clock):
    times = StepTimes(torch.device("cpu"))
    for _ in range(2):
        with times.of("forward"):
            clock[0] += 3.0
    with times.of("backward"):
        clock[0] += 1.0
    clock[0] += 50.0
    assert times.taken() == {"copy_s": 0.0, "forward_s": 6.0, "backward_s": 1.0, "sync_s": 0.0}
    assert set(times.taken().values()) == {0.0}


def test_making_items_is_a_phase_and_using_them_is_not(clock):
    def make():
        for number in range(3):
            clock[0] += 2.0
            yield number

    times, seen = StepTimes(torch.device("cpu")), []
    for item in times.each("copy", make()):
        clock[0] += 10.0
        seen.append(item)
    assert seen == [0, 1, 2]
    assert times.taken()["copy_s"] == 6.0


def test_a_step_costs_what_went_by_since_the_last():
    cost = StepCost()
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    spent = cost.cpu_s()
    assert 0.02 <= spent < 1.0
    assert cost.cpu_s() < spent
    found = cost.step(waited_s=0.0, cpu_s=0.02, tokens=1000)
    assert found["idle_frac"] == 0.0
    assert found["step_s"] > 0.0
    assert found["host_cpu_s_per_mtoken"] == pytest.approx(20.0)
    assert cost.step(waited_s=0.0, cpu_s=0.02, tokens=0)["host_cpu_s_per_mtoken"] != 0.0
