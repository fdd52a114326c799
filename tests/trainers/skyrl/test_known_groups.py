"""What SkyRL's loss gets of the known groups, position by position: real trainer, worker, model and loss."""

import asyncio

import numpy as np
import pytest

import shmbridge
from shmbridge.testing.known_groups import known_groups

VOCABULARY = 28
NORM = 64  # times 4 rows: a power of two, so that SkyRL's loss reduction is exact


class Seen:
    """The arguments of every call of the loss, and the tokens that the model got before it."""

    def __init__(self, worker):
        self.rows, self.tokens, self._real = [], [], worker.policy_loss_fn
        worker.policy_loss_fn = self
        worker.model.register_forward_pre_hook(self._model)

    def _model(self, model, args):
        if model.training:
            self.tokens += [row.numpy() for row in args[0]]

    def __call__(self, log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs):
        for row in range(len(advantages)):
            self.rows.append(
                {
                    "advantages": advantages[row].numpy() * 4 * NORM,
                    "mask": loss_mask[row].numpy(),
                    "logprobs": None if rollout_logprobs is None else rollout_logprobs[row].numpy(),
                }
            )
        return self._real(
            log_probs,
            old_log_probs,
            advantages,
            config,
            loss_mask=loss_mask,
            rollout_logprobs=rollout_logprobs,
        )


def begin_of(row):
    """Where the response begins, for SkyRL: there is a token before it and one in it."""
    return min(row.prompt_length, len(row.tokens) - 1)


def compare(seen, groups, shift=0) -> float:
    """Asserts that all arrays are equal, and returns the largest difference."""
    largest = 0.0
    expected = [row for group in groups for row in group.rows]
    assert len(seen.rows) == len(seen.tokens) == len(expected)
    for got, tokens, row in zip(seen.rows, seen.tokens, expected, strict=True):
        begin = begin_of(row)
        size = len(row.tokens) - begin
        np.testing.assert_array_equal(tokens[-len(row.tokens) :], np.roll(row.tokens, shift))
        for name, values in (
            ("advantages", row.advantages),
            ("mask", row.trained.astype(np.float32)),
            ("logprobs", row.logprobs),
        ):
            if got[name] is None:
                continue
            values = np.roll(values[begin:], shift)
            np.testing.assert_allclose(got[name][-size:], values, rtol=0, atol=2e-7, err_msg=name)
            assert not got[name][:-size].any(), name
            largest = max(largest, float(np.abs(got[name][-size:] - values).max()))
    return largest


@pytest.fixture
def trained(example, tiny, bridge, tmp_path, make_producer):
    """Trains one step on groups, and returns what the loss saw, and the trainer's metrics."""

    def run(groups, *settings, version=None):
        producer = make_producer(lane_bytes="1M")
        for group in groups:
            group.put(producer)
        cfg = example.config(
            tiny,
            bridge,
            len(groups),
            "trainer.max_training_steps=1",
            "trainer.policy_mini_batch_size=1",
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm",
            f"trainer.algorithm.max_seq_len={NORM}",
            f"trainer.ckpt_path={tmp_path}",
            *settings,
        )
        logged = {}
        with example.experiment(cfg) as trainer:
            feed = trainer.generator.feed
            if version is not None:
                feed.begin_run(version)
            seen = Seen(trainer.dispatch.worker)
            trainer.tracker.log = lambda data, **_: logged.update(data)
            asyncio.run(trainer.train())
            logged["held"] = feed.stats()["held"]
            logged["stats"] = trainer.generator.stats()
        return seen, logged

    return run


def test_the_loss_sees_what_was_produced(trained):
    groups = known_groups(vocabulary=VOCABULARY)
    seen, logged = trained(groups)
    assert compare(seen, groups) == 0.0
    assert logged["held"] == 0
    assert logged["shmbridge/groups"] == 5
    assert logged["shmbridge/rows_without_response"] == 1
    assert logged["shmbridge/rows_without_logprobs"] == 4
    assert logged["shmbridge/trajectories_own_advantages"] == 16
    assert all(row["logprobs"] is None for row in seen.rows)


def test_the_comparison_is_red_if_shifted_by_one(trained):
    groups = known_groups(vocabulary=VOCABULARY)
    seen, _ = trained(groups)
    with pytest.raises(AssertionError):
        compare(seen, groups, shift=1)
    for row in seen.rows:
        row["advantages"] = np.roll(row["advantages"], 1)
    with pytest.raises(AssertionError, match="advantages"):
        compare(seen, groups)


def test_a_loss_over_the_samplers_log_probabilities_sees_them(trained):
    groups = [group for group in known_groups(vocabulary=VOCABULARY) if group.name != "no columns"]
    seen, logged = trained(groups, "trainer.algorithm.policy_loss_type=rollout_is")
    assert all(row["logprobs"] is not None for row in seen.rows)
    assert compare(seen, groups) == 0.0
    for row in seen.rows:
        row["logprobs"] = np.roll(row["logprobs"], 1)
    with pytest.raises(AssertionError, match="logprobs"):
        compare(seen, groups)
    assert logged["stats"]["rows_without_logprobs"] == 0


def test_that_loss_refuses_rows_without_them_and_they_stay(trained, bridge):
    from shmbridge.consumers.skyrl.generator import NoLogprobs

    groups = [group for group in known_groups(vocabulary=VOCABULARY) if group.name == "no columns"]
    with pytest.raises(NoLogprobs, match=r"4 of 4 rows without inference_logprobs.*policy_loss_type=regular"):
        trained(groups, "trainer.algorithm.policy_loss_type=rollout_is")
    with shmbridge.Consumer(bridge) as following, following.get(timeout_s=5.0) as again:
        assert again.meta.group_id == groups[0].group_id


@pytest.mark.parametrize(("loss", "warned"), [("regular", True), ("rollout_is", False)])
def test_stale_rows_that_count_as_fresh_are_named_once(trained, capfd, loss, warned):
    groups = [group for group in known_groups(vocabulary=VOCABULARY) if group.name != "no columns"]
    _, logged = trained(groups, f"trainer.algorithm.policy_loss_type={loss}", version=9)
    assert logged["shmbridge/rows_stale"] == 16
    said = [line for line in capfd.readouterr().err.splitlines() if "as if fresh" in line]
    assert len(said) == warned, "SkyRL writes what is logged to stderr"
    if warned:
        assert "16 rows of a step" in said[0]
        assert "-> trainer.algorithm.policy_loss_type=rollout_is" in said[0]
