"""samples.jsonl: which groups are sampled, their texts and advantages per token, and what bounds the file."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.report import samples
from shmbridge.consumers.learner.report.logs import MetricsLog, OtherLog
from shmbridge.consumers.learner.report.samples import SampleLog, TokenTexts
from shmbridge.consumers.learner.train.training_step import TrainingStep


class Letters:
    """A tokenizer: id 0 is a space that is dropped in front, 1..26 letters, 27 and 28 the halves of é."""

    def decode(self, ids, **_):
        if any(each > 28 for each in ids):
            raise IndexError("no such id")
        half = {27: b"\xc3", 28: b"\xa9", 0: b" "}
        text = b"".join(half.get(each) or bytes([96 + each]) for each in ids).decode(errors="replace")
        return text.removeprefix(" ")


class Heard(OtherLog):
    def __init__(self):
        super().__init__("heard", "Heard", print)
        self.samples = []

    def log(self, metrics):
        pass

    def log_samples(self, samples):
        self.samples += samples


@pytest.fixture
def batch(packed_batch):
    """Three groups of two: scores differ most in the second; a prompt of two tokens each."""
    rows = [[1, 2, 3], [1, 2, 4], [5, 6, 0, 7], [5, 6, 27, 28], [8, 9, 10], [8, 9, 11]]
    return packed_batch(
        rows,
        groups=[0, 0, 1, 1, 2, 2],
        scores=[0.5, 0.5, 0.0, 1.0, 0.25, 0.5],
        prompt_lengths=[2] * 6,
        masks=[[0, 0, *[1] * (len(row) - 2)] for row in rows],
        step_rewards=[None, None, [0.1, 0.2], None, None, None],
        step_ends=[None, None, [3, 4], None, None, None],
        finish_reasons=[0, 0, 1, 0, None, None],
        envs=["letters"] * 6,
    )


@pytest.fixture
def open_log(tmp_path):
    def make(**more):
        said = []
        log = SampleLog(tmp_path / "samples.jsonl", 10, 3, Letters(), said.append, **more)
        log.said_to_user = said
        return log

    return make


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines() if line]


def sampled(log, batch, step=1):
    rows, _ = prepare(batch, 1.0)
    log.pick(batch, rows, step)
    log.log({"step": step})


def test_the_widest_group_and_another_with_what_was_trained(open_log, batch, tmp_path):
    heard = Heard()
    sampled(open_log(others=[heard]), batch)
    widest, other = lines(tmp_path)
    assert heard.samples == [widest, other]
    assert (widest["why"], other["why"]) == ("spread", "random")
    assert (widest["step"], widest["env_name"], widest["prompt"]) == (1, "letters", "ef")
    space, accent = widest["trajectories"]
    assert (space["completion"], space["tokens"]) == (" g", [" ", "g"])
    assert (accent["completion"], accent["tokens"]) == ("é", ["", "é"])
    assert (space["score"], space["finish_reason"], accent["finish_reason"]) == (0.0, "length", "stop")
    assert (space["step_rewards"], space["step_ends"]) == ([0.1, 0.2], [1, 2])
    assert "step_rewards" not in accent
    assert space["advantages"] == pytest.approx([-1.0, -1.0], abs=1e-3)
    assert accent["advantages"] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert other["trajectories"][0]["finish_reason"] in (None, "stop")


def test_the_group_drawn_is_the_seeds_and_the_steps(open_log, batch, tmp_path):
    for _ in range(2):
        for step in range(1, 9):
            sampled(open_log(), batch, step)
    drawn = [each["group_id"] for each in lines(tmp_path) if each["why"] == "random"]
    assert drawn[:8] == drawn[8:]
    assert len(set(drawn)) == 2


def test_a_sample_every_ten_steps_and_of_the_first(open_log):
    log = open_log()
    assert [step for step in range(1, 31) if log.due(step)] == [1, 10, 20, 30]


def test_untrained_tokens_have_no_advantage_and_scores_may_be_missing(open_log, packed_batch, tmp_path):
    batch = packed_batch([[1, 2, 3, 4]], masks=[[0, 1, 0, 1]], advantages=[[0.0, 0.5, 9.0, -0.25]])
    sampled(open_log(), batch)
    (only,) = lines(tmp_path)
    (row,) = only["trajectories"]
    assert only["prompt"] == ""  # prompt_length says 0
    assert row["advantages"] == [None, 0.5, None, -0.25]
    assert row["score"] is None


def test_long_rows_keep_their_ends_and_what_is_cut_is_counted(open_log, packed_batch, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "HEAD", 3)
    monkeypatch.setattr(samples, "TAIL", 2)
    monkeypatch.setattr(samples, "MOST_PROMPT", 2)
    rows = [[1, 2, 3, *range(4, 14)]] * 3
    monkeypatch.setattr(samples, "MOST_ROWS", 2)
    log = open_log()
    sampled(log, packed_batch(rows, masks=[[0] * 3 + [1] * 10] * 3, prompt_lengths=[3] * 3))
    (only,) = lines(tmp_path)
    assert (only["prompt"], only["group_size"], len(only["trajectories"])) == ("bc", 3, 2)
    row = only["trajectories"][0]
    assert (row["completion"], row["cut_at"], row["cut"]) == ("deflm", 3, 5)
    assert len(row["advantages"]) == 5
    assert log.counters()["samples_tokens_cut_total"] == 1 + 2 * 5


def test_a_full_file_takes_no_more_and_says_so_once(open_log, batch, tmp_path):
    log = open_log(most_bytes=2500)
    for step in range(1, 9):
        sampled(log, batch, step)
    assert (tmp_path / "samples.jsonl").stat().st_size <= 2500
    written = len(lines(tmp_path))
    assert 0 < written < 16
    assert log.counters()["samples_left_out_total"] == 16 - written
    assert len(log.said_to_user) == 1
    assert "no more samples" in log.said_to_user[0]


def test_a_torn_line_of_a_killed_writer_stays_alone(open_log, batch, tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "pro')
    sampled(open_log(), batch)
    torn, *rest = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert torn == '{"step": 1, "pro'
    assert [json.loads(each)["step"] for each in rest] == [1, 1]


def test_a_failure_is_counted_in_the_metrics_and_training_goes_on(batch, tmp_path):
    said = []
    log = SampleLog(tmp_path / "missing" / "samples.jsonl", 1, 0, None, said.append)
    rows, _ = prepare(batch, 1.0)
    with MetricsLog(tmp_path / "metrics.jsonl", log) as metrics:
        for step in (1, 2):
            log.pick(batch, rows, step)
            metrics.append({"step": step})
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [each["samples_failures_total"] for each in written] == [1, 2]
    assert len(said) == 1
    assert "training goes on" in said[0]


def test_without_a_tokenizer_or_with_an_unknown_id_the_text_is_the_id():
    assert TokenTexts(None).texts([3, 17]) == ["<3>", "<17>"]
    assert TokenTexts(Letters()).texts([3, 99, 27, 3]) == ["c", "<99>", "\ufffd", "c"]


def test_texts_together_are_the_text_of_the_row():
    rng = np.random.default_rng(7)
    texts, tokenizer = TokenTexts(Letters()), Letters()
    for _ in range(50):
        ids = [1, *rng.integers(0, 29, 12).tolist()]
        assert "".join(texts.texts(ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(("done", "sampled"), [(8, [False, False]), (9, [False, True])])
def test_a_step_is_sampled_from_its_last_batch(open_log, batch, done, sampled):
    looks = []

    def accumulate(batch, version, *, first, look):
        looks.append(look is not None)
        return {}

    learner = SimpleNamespace(step=done, accumulate=accumulate)
    config = parse(["--bridge", "b", "--model", "m", "--steps", "99", "--accumulate", "2"])
    source, around = SimpleNamespace(training_version=0), SimpleNamespace(samples=open_log())
    step = TrainingStep(learner, source, None, None, None, config, around)
    for _ in sampled:
        step.take(batch)
    assert looks == sampled
