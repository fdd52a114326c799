"""The learner's loop: the order of a step, the state after a stop, the files of the run directory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from types import SimpleNamespace

import pytest

from shmbridge.consumers import grpo
from shmbridge.consumers.feed import Drained
from shmbridge.consumers.learner.checkpoint import load_progress
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.data.sources import HubSource, who_is_missing
from shmbridge.consumers.learner.report.logs import MetricsLog
from shmbridge.consumers.learner.stopping import Stopped, StopSignals
from shmbridge.consumers.learner.train.publishing import first_version
from shmbridge.consumers.learner.train.starting_point import Saver, decided, new_learner
from shmbridge.testing import json_lines

ROWS = [[3, 4, 5, 6], [3, 4, 7, 8], [9, 1, 2], [9, 1, 3]]


class FakeFeed:
    """The learner's side of a feed, and of its consumer; records its calls in order."""

    def __init__(self, batches, version=0, release_at="step"):
        self._batches, self.consumer, self.release_at = iter(batches), self, release_at
        self._held = []
        self.policy_version = self.training_version = version
        self.paused = False
        self.events = []

    def one_wait(self):
        return contextlib.nullcontext()

    def take(self, timeout_s):
        if (batch := next(self._batches, None)) is None:
            raise Drained("drained")
        return SimpleNamespace(batch=batch)

    def trained(self, steps):
        self._held += steps
        if self.release_at == "step":
            self.checkpointed()

    def checkpointed(self):
        self.events += ["release"] * len(self._held)
        self._held = []

    def rest(self):
        pass

    def give_back(self, step):
        self.events.append("give back")

    def publish_policy_version(self, version):
        self.events.append(f"version {version}")
        self.policy_version = self.training_version = version

    def stats(self):
        lanes = {"lanes_live": 2, "lanes_dead": 1, "queue_groups": 5}
        lost = {"dropped_total": 2, "discarded_total": 1, "discarded_total{stale}": 1}
        return {"records_total": 9, "held": 3} | lanes | lost


class Session:
    """Everything `grpo.learn` works with, on a fake consumer and a real model."""

    def __init__(self, tmp_path, model, batches, *flags, version=0):
        self.options = parse(
            ["--bridge", "b", "--model", "m", "--lr", "1e-2", "--run-dir", str(tmp_path), *flags]
        )
        release_at = "checkpoint" if self.options.holds_until_saved else "step"
        self.consumer = FakeFeed(batches, version, release_at)
        self.learner = new_learner(model, self.options)
        self.saver = Saver(tmp_path / "checkpoints", self.learner, None, keep=2)
        self.metrics = tmp_path / "metrics.jsonl"

    def publish(self, version):
        self.consumer.events.append(f"weights {version}")

    def learn(self, stops=None, publish=None):
        stops = stops or StopSignals()
        source = HubSource(self.consumer, self.options, stops)
        with MetricsLog(self.metrics) as log:
            grpo.learn(self.learner, source, publish or self.publish, self.saver, log, self.options, stops)

    def logged(self):
        return json_lines(self.metrics)


@pytest.fixture
def batches(packed_batch):
    def make(count, **more):
        make_one = {"scores": [1.0, 0.0, 0.0, 1.0], "groups": [0, 0, 1, 1], **more}
        return [packed_batch(ROWS, **make_one) for _ in range(count)]

    return make


def test_a_step_publishes_weights_then_version_then_releases(tiny_model, batches, tmp_path):
    session = Session(tmp_path, tiny_model(1), batches(5), "--steps", "2", version=7)
    session.learn()
    assert session.consumer.events == [
        *("weights 8", "version 8", "release"),
        *("weights 9", "version 9", "release"),
    ]


def test_metrics_say_what_happened(tiny_model, batches, tmp_path, capsys):
    flags = ("--steps", "3", "--log-every", "2", "--save-every", "2")
    session = Session(tmp_path, tiny_model(1), batches(9, version=4), *flags, version=6)
    session.learn()
    first, second, third = session.logged()
    assert [line["step"] for line in (first, second, third)] == [1, 2, 3]
    assert [line["policy_version"] for line in (first, second, third)] == [7, 8, 9]
    assert (first["staleness_mean"], third["staleness_max"]) == (2.0, 4)
    assert first["tokens"] == 14
    assert (first["trained_tokens"], first["trajectories"], first["groups"]) == (10, 4, 2)
    assert first["reward_mean"] == 0.5
    assert first["ratio_mean"] == pytest.approx(1.0)
    assert (first["dropped_total"], first["discarded_total"]) == (2, 1)
    timings = {"wait_s", "forward_backward_s", "update_s", "publish_s", "time"}
    assert {name for name in timings if third[name] >= 0} == timings
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000003"]  # every second one, and the last
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/3", "step 3/3"]


def test_a_drained_bridge_ends_the_loop_early(tiny_model, batches, tmp_path):
    session = Session(tmp_path, tiny_model(1), batches(2), "--steps", "100")
    session.learn()
    assert session.learner.step == 2


def test_a_finished_run_takes_no_batch(tiny_model, batches, tmp_path):
    session = Session(tmp_path, tiny_model(1), batches(2), "--steps", "4")
    session.learner.step = 4
    session.learn()
    assert session.consumer.events == []


def test_a_signal_while_computing_leaves_the_batch_to_the_next_learner(tiny_model, batches, tmp_path):
    session = Session(tmp_path, tiny_model(1), batches(5), "--steps", "5")
    compute = session.learner.accumulate

    def interrupted(*given, **named):
        if session.learner.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return compute(*given, **named)

    session.learner.accumulate = interrupted
    with StopSignals() as stops, pytest.raises(Stopped) as stopped:
        session.learn(stops)
    assert stopped.value.signum == signal.SIGTERM
    assert session.consumer.events == ["weights 1", "version 1", "release", "give back"]
    assert len(session.logged()) == 1


def test_a_signal_while_publishing_waits_for_the_release(tiny_model, batches, tmp_path):
    session = Session(tmp_path, tiny_model(1), batches(5), "--steps", "5")

    def interrupted(version):
        session.publish(version)
        signal.raise_signal(signal.SIGINT)

    with StopSignals() as stops, pytest.raises(Stopped):
        session.learn(stops, interrupted)
    assert session.consumer.events == ["weights 1", "version 1", "release"]
    assert len(session.logged()) == 1


def test_stop_signals_put_the_old_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_wait_says_who_is_missing():
    consumer = FakeFeed([])
    assert who_is_missing(consumer, 8) == "2 of 3 lanes have a living producer, 5 of 8 groups are there"
    consumer.paused = True
    assert who_is_missing(consumer, 8).endswith("there, the bridge is paused")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [((None, None, None), 0), ((-1, 0, None), 1), ((50, 57, 50), 58), ((50, 50, None), 51)],
)
def test_a_start_takes_a_version_nobody_has_used(seen, expected):
    assert first_version(*seen) == expected


def test_a_fresh_start_over_an_old_run_is_refused_and_resume_takes_the_newest(tmp_path, capsys):
    flags = ["--bridge", "b", "--model", "m", "--steps", "5", "--run-dir", str(tmp_path)]
    for step in (9, 10):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "learner.json").write_text(json.dumps({"step": step, "policy_version": step}))
    assert decided(parse([*flags, "--resume"])).checkpoint.name == "step-00000010"
    assert grpo.main(flags) == 1
    assert "--resume goes on with it" in capsys.readouterr().err


def test_resume_without_a_checkpoint_is_a_fresh_start(tmp_path):
    flags = ["--bridge", "b", "--model", "m", "--steps", "5", "--run-dir", str(tmp_path), "--resume"]
    assert decided(parse(flags)).checkpoint is None


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    status = grpo.main(
        ["--bridge", "b", "--model", str(tmp_path / "none"), "--steps", "1", "--run-dir", str(tmp_path)]
    )
    assert status == 1
    assert "with a model -> give the folder of a model" in capsys.readouterr().err


def test_metrics_survive_a_torn_line_and_numbers_json_cannot_say(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    with MetricsLog(path) as log:
        log.append({"step": 2, "grad_norm": float("nan"), "loss": 0.5})
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1]) == {"step": 2, "grad_norm": None, "loss": 0.5}
    assert len(lines) == 3


def test_several_batches_make_a_step_and_are_released_together(tiny_model, batches, tmp_path):
    session = Session(tmp_path, tiny_model(1), batches(5), "--steps", "9", "--accumulate", "2", version=7)
    session.learn()
    assert session.consumer.events == [
        *("weights 8", "version 8", "release", "release"),
        *("weights 9", "version 9", "release", "release"),
        *("weights 10", "version 10", "release"),  # drained: the last step takes what is there
    ]
    lines = session.logged()
    assert [(line["groups"], line["tokens"], line["trajectories"]) for line in lines] == [
        (4, 28, 8),
        (4, 28, 8),
        (2, 14, 4),
    ]
    assert [line["reward_mean"] for line in lines] == [0.5] * 3
    assert lines[0]["atropos/fallback_groups_total"] == 4


def test_groups_held_until_saved_are_released_after_the_checkpoint(tiny_model, batches, tmp_path):
    flags = ("--steps", "5", "--save-every", "2", "--hold-until-saved")
    session = Session(tmp_path, tiny_model(1), batches(9), *flags)
    save = session.saver.save

    def saved(version):
        session.consumer.events.append(f"save {version}")
        save(version)

    session.saver.save = saved
    session.learn()
    events = [event for event in session.consumer.events if not event.startswith("weights")]
    one_save = ["version 1", "version 2", "save 2", "release", "release"]
    assert events[:5] == one_save
    assert events[5:10] == ["version 3", "version 4", "save 4", "release", "release"]
    assert events[10:13] == ["version 5", "save 5", "release"]


def test_a_checkpoint_is_written_before_the_release_and_knows_what_is_held(tiny_model, batches, tmp_path):
    session = Session(tmp_path, tiny_model(1), batches(3), "--steps", "2", "--save-every", "1")
    session.learn()
    first, second = (load_progress(path) for path in sorted((tmp_path / "checkpoints").iterdir()))
    assert (first.step, first.groups, first.trajectories, first.tokens) == (1, 2, 4, 14)
    assert (second.step, second.groups, second.tokens) == (2, 4, 28)
    assert first.held == second.held == {"test-1": [0, 1]}


def test_a_condition_that_is_met_ends_the_run(tiny_model, batches, tmp_path, capsys):
    flags = ("--steps", "9", "--stop-when", "reward_mean>=0.5", "--stop-patience", "3")
    session = Session(tmp_path, tiny_model(1), batches(9), *flags)
    session.learn()
    assert session.learner.step == 3
    assert "stopped early: reward_mean>=0.5 in 3 steps" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_the_hook_gets_step_model_and_tokenizer_and_its_failure_ends_nothing(
    tiny_model, batches, tmp_path, monkeypatch, capsys
):
    (tmp_path / "own_hook.py").write_text(
        "def score(step, model, tokenizer):\n"
        "    if step == 4:\n        raise RuntimeError('no data')\n"
        "    return {'accuracy': step / 10, 'training': model.num_parameters() > 0 and tokenizer is None}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--steps", "5", "--eval-hook", "own_hook:score", "--eval-every", "2")
    session = Session(tmp_path, tiny_model(1), batches(9), *flags)
    session.learn()
    lines = session.logged()
    assert [line.get("eval/accuracy") for line in lines] == [None, 0.2, None, None, None]
    assert [line["eval/hook_failures_total"] for line in lines] == [0, 0, 0, 1, 1]
    assert (
        "the evaluation hook failed at step 4, training goes on: RuntimeError: no data"
        in capsys.readouterr().out
    )


def test_times_of_the_phases_are_logged_at_every_step(tiny_model, batches, tmp_path):
    session = Session(tmp_path, tiny_model(1), batches(5), "--steps", "3")
    session.learn()
    for line in session.logged():
        parts = line["copy_s"] + line["forward_s"] + line["backward_s"] + line["sync_s"]
        assert 0.0 < parts <= line["forward_backward_s"]
        assert line["forward_backward_s"] <= line["step_s"]
        assert 0.0 <= line["idle_frac"] <= 1.0
        assert line["host_cpu_s_per_mtoken"] > 0.0


def test_a_disk_that_takes_no_metrics_is_said_once_and_ends_nothing(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with MetricsLog(path) as log:
        log.append({"step": 1})
        log.append({"step": 2})
    assert (
        capsys.readouterr().out.count(
            "metrics.jsonl cannot be written, training goes on without: No space left"
        )
        == 1
    )


def test_metrics_that_were_lost_are_counted_in_those_that_come_later(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write = os.write
    with MetricsLog(path) as log:
        monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:7]))
        log.append({"step": 1})
        monkeypatch.setattr(os, "write", write)
        log.append({"step": 2})
    torn, whole = path.read_text().splitlines()
    assert torn == '{"step"'
    assert json.loads(whole) == {"step": 2, "metrics_failures_total": 1}
