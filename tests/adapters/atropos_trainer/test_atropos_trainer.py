"""Atropos' own trainer, fed from a bridge: its real loop, its real loss, the producer's advantages."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from example_trainer import trainers, training
from legacy_run import config_of

import shmbridge
from shmbridge.consumers.atropos_trainer import BridgeData
from shmbridge.consumers.feed import Drained
from shmbridge.schema import recorded_logprobs
from shmbridge.testing import wait_until
from shmbridge.testing.fixtures import known_groups, loss_matrix
from shmbridge.watch import diagnosis
from tests.trainers.contract import Seen, assert_contract

HERE = Path(__file__).parent


@pytest.fixture
def losses(monkeypatch):
    """What each call of upstream's loss got: (tokens, labels, advantages, log-probabilities)."""
    seen, inner = [], training.compute_grpo_loss

    def loss(model, tokens, labels, advantages, temperatures, accumulation, *, inference_logprobs, **more):
        expanded = advantages.expand_as(labels)  # as upstream does before it multiplies
        seen.append([each.clone().numpy() for each in (tokens, labels, expanded, inference_logprobs)])
        return inner(
            model, tokens, labels, advantages, temperatures, accumulation,
            inference_logprobs=inference_logprobs, **more,
        )  # fmt: skip

    monkeypatch.setattr(training, "compute_grpo_loss", loss)
    return seen


def train(data, config):
    with data.installed_in(trainers):
        trainers.train_legacy(config)


def unshifted(tokens, labels, advantages, logprobs) -> Seen:
    """The row of a micro-batch of one row; upstream's labels are one place before their tokens."""
    length = np.flatnonzero(tokens[0])[-1] + 1  # padding is 0
    arrays = (labels[0] != -100, advantages[0], recorded_logprobs(logprobs[0]))
    return Seen(tokens[0, :length], *(np.append(np.zeros(1), each[: length - 1]) for each in arrays))


def test_the_loss_gets_what_was_put(bridge, tiny, tmp_path, losses, without_vllm):
    groups = loss_matrix(vocabulary=28)
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for group in groups:
            group.put(producer)
        with BridgeData(bridge, timeout_s=10) as data:
            train(data, config_of(str(tiny), str(tmp_path), 1, 36))
            assert (data.metrics["groups_fallback"], data.metrics["micro_batches_untrained"]) == (1, 1)
    seen = [unshifted(*loss) for loss in losses]
    assert_contract("Atropos' example trainer", version("atroposlib"), "", groups, seen)
    assert shmbridge.clean(bridge).undelivered == {}


def test_training_raises_the_tokens_that_advantages_favour(bridge, tiny, tmp_path, without_vllm, monkeypatch):
    target, steps = 7, 6
    group = {
        "tokens": [[6, 8, target, 9]] * 4,
        "loss_mask": [[0, 0, 1, 1]] * 4,
        "advantages": [[0.0, 0.0, 1.0, 0.0]] * 4,  # only the target token, not the one after it
        "inference_logprobs": [[1.0, 1.0, -3.0, -3.0]] * 4,
    }
    seen = []
    inner = training.compute_grpo_loss

    def loss(*arguments, **named):
        result, metrics = inner(*arguments, **named)
        seen.append(metrics["training_logprobs"].tolist())
        return result, metrics

    monkeypatch.setattr(training, "compute_grpo_loss", loss)
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer, BridgeData(bridge, timeout_s=10) as data:
        for _ in range(steps):
            producer.put(group)
        train(data, config_of(str(tiny), str(tmp_path), steps, 4))
    (before, other), (after, other_after) = seen[0], seen[-1]
    assert after > before + 0.1
    assert abs(other_after - other) < after - before


def test_advantages_of_tokens_are_refused_beside_other_rows(bridge, tiny, tmp_path, without_vllm):
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        known_groups(vocabulary=28)[0].put(producer)
        try:
            with BridgeData(bridge, timeout_s=10) as data:
                train(data, config_of(str(tiny), str(tmp_path), 1, 4, size=4))
        except ValueError as refused:
            why = str(refused)
        for each in ("known-3-0", "one row at a time, not for 4", "batch_size=1"):
            assert each in why
        with shmbridge.Consumer(bridge) as consumer, consumer.get(10) as record:
            assert record.meta.group_id == "known-3-0"
            assert record.meta.redelivered


def test_advantages_of_rows_go_together(bridge):
    scores = [0.0, 1.0, 2.0, 3.0]
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer, BridgeData(bridge, timeout_s=10) as data:
        producer.put({"tokens": [[1, 2, 3]] * 4, "loss_mask": [[0, 1, 1]] * 4, "scores": scores})
        data.register_trainer(config_of("", "", 1, 4, size=4))
        [(tokens, labels, advantages, temperatures, logprobs)], _ = data.get_data(4, 128)
    assert [each.shape for each in (tokens[0], labels[0], advantages[0])] == [(4, 64), (4, 64), (4, 1)]
    assert temperatures[0].shape == (4, 1, 1)
    assert logprobs is None
    centred = np.array(scores) - 1.5
    np.testing.assert_allclose(advantages[0][:, 0], centred / centred.std(), rtol=1e-3)
    assert tokens[0].dtype == labels[0].dtype == torch.int64


@pytest.mark.timeout(180)
def test_a_killed_trainers_batch_comes_again(bridge, tiny, tmp_path):
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for group in known_groups(vocabulary=28):
            group.put(producer)
        words = [
            sys.executable,
            str(HERE / "legacy_run.py"),
            bridge,
            str(tiny),
            str(tmp_path),
            "5",
            "4",
            "kill",
        ]
        assert subprocess.run(words, capture_output=True, timeout=150, check=False).returncode == -9
        with shmbridge.Consumer(bridge) as consumer:
            records = [consumer.get(10) for _ in range(5)]  # the fourth group came in two fragments
            assert records[0].meta.redelivered
            assert [each.meta.group_id[-1] for each in records] == ["1", "2", "3", "3", "4"]
            for each in records:
                each.release()
    wait_until(lambda: not shmbridge.clean(bridge).undelivered)


def test_a_module_that_is_not_upstreams_is_refused(bridge):
    with pytest.raises(AttributeError, match="get_data"), BridgeData(bridge).installed_in(subprocess):
        pass


def test_data_before_registration_says_what_to_call(bridge):
    with pytest.raises(RuntimeError, match="register_trainer"):
        BridgeData(bridge).get_data(1, 64)


def test_a_row_without_tokens_trains_nothing(bridge):
    group = {"tokens": [[1, 2, 3], []], "loss_mask": [[0, 1, 1], []], "advantages": [[0.0, 1.0, 1.0], []]}
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer, BridgeData(bridge, timeout_s=10) as data:
        producer.put(group, foreign=True)
        data.register_trainer(config_of("", "", 1, 2, size=2))
        [(_, labels, *_)], _ = data.get_data(2, 128)
    assert (labels[0][1] == -100).all()


def test_waiting_may_be_tried_again_and_a_drained_bridge_says_so(bridge):
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer, BridgeData(bridge, timeout_s=0.2) as data:
        data.register_trainer(config_of("", "", 1, 1))
        with pytest.raises(shmbridge.ConsumerEmpty):
            data.get_data(1, 128)
        producer.put({"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]})
        assert len(data.get_data(1, 128)[0]) == 1
        data._feed.drain()
        with pytest.raises(Drained, match="is drained: 0 groups are there"):
            data.get_data(1, 128)


def test_a_step_of_other_rows_than_asked_for_is_said_once(bridge, caplog):
    """Upstream divides by the rows that were asked for; groups are never cut."""
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer, BridgeData(bridge, timeout_s=10) as data:
        for rows in (4, 5, 6):
            producer.put({"tokens": [[1, 2, 3]] * rows, "loss_mask": [[0, 1, 1]] * rows})
        data.register_trainer(config_of("", "", 1, 4, size=1))
        for rows, lines in ((4, 0), (5, 1), (6, 1)):
            data.get_data(1, 128)
            assert data.metrics["rows"] == rows
            assert caplog.text.count(f"where batch_size x gradient_accumulation_steps are {4}") == lines


def test_a_wait_without_an_end_is_said(bridge, caplog, monkeypatch):
    monkeypatch.setattr(diagnosis, "LONG_S", 0.2)
    with BridgeData(bridge, timeout_s=2.0) as data:
        data.register_trainer(config_of("", "", 1, 1))
        with pytest.raises(shmbridge.ConsumerEmpty):
            data.get_data(1, 128)
    assert caplog.text.count(f"bridge {bridge!r}: the learner waits for environments") == 1
    assert "no producer has ever come" in caplog.text
