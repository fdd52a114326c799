"""What SkyRL's loss gets is what was put, with its real trainer, worker, model and loss:
tests/trainers/contract.py.
"""

import asyncio
from importlib.metadata import version

import numpy as np
import pytest

import shmbridge
from shmbridge.testing.fixtures import loss_matrix
from tests.trainers.contract import Seen, assert_contract, fully_recorded, without_truncated

VOCABULARY = 28
NORM = 64  # times 4 rows: a power of two, so that SkyRL's loss reduction is exact


class Captured:
    """The rows of every call of the loss, with the tokens that the model got before it."""

    def __init__(self, worker):
        self.rows, self._real = [], worker.policy_loss_fn
        worker.policy_loss_fn = self
        worker.model.register_forward_pre_hook(self._model, with_kwargs=True)

    def _model(self, model, args, named):
        self._tokens, self._real_tokens = args[0], named.get("attention_mask", args[-1]).bool()

    def __call__(self, log_probs, old_log_probs, advantages, **named):
        arrays = [named["loss_mask"], advantages * 4 * NORM, named["rollout_logprobs"]]
        for row, real in enumerate(self._real_tokens.numpy()):
            before = np.zeros(len(real) - advantages.shape[1])  # all arrays end where the tokens end
            seen = [each if each is None else np.append(before, each[row].numpy())[real] for each in arrays]
            self.rows.append(Seen(self._tokens[row].numpy()[real], *seen))
        return self._real(log_probs, old_log_probs, advantages, **named)


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
            sum(group.split == "train" for group in groups),
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
            seen = Captured(trainer.dispatch.worker)
            trainer.tracker.log = lambda data, **_: logged.update(data)
            asyncio.run(trainer.train())
            logged |= {"of the feed": feed.stats()}
        return seen, logged

    return run


SAMPLERS = "trainer.algorithm.policy_loss_type=rollout_is"
OVERLONG = "generator.apply_overlong_filtering=true"


@pytest.mark.parametrize("setting", ["", SAMPLERS, OVERLONG])
def test_the_loss_gets_what_was_put(trained, setting):
    groups = loss_matrix(vocabulary=VOCABULARY)
    if setting == SAMPLERS:
        groups = fully_recorded(groups)
    seen, logged = trained(groups, *[setting] * bool(setting))
    assert (logged["of the feed"]["held"], logged["of the feed"]["left_out_total{eval}"]) == (0, 1)
    assert logged["shmbridge/rows_without_response"] == 1
    assert logged.get("shmbridge/trajectories_truncated", 0) == 2 * (setting == OVERLONG)
    assert all((row.old_logprobs is None) == (setting != SAMPLERS) for row in seen.rows)
    if setting == OVERLONG:
        groups = without_truncated(groups)
    assert_contract("SkyRL", version("skyrl"), f"`{setting}`" if setting else "", groups, seen.rows)


def test_that_loss_refuses_rows_without_them_and_they_stay(trained, bridge):
    from shmbridge.consumers.trajectories import NoLogprobs

    groups = [group for group in loss_matrix(vocabulary=VOCABULARY) if group.name == "no columns"]
    with pytest.raises(NoLogprobs, match=r"row 0 of .* has no log-probability.*loss_type=regular"):
        trained(groups, "trainer.algorithm.policy_loss_type=rollout_is")
    with shmbridge.Consumer(bridge) as following, following.get(timeout_s=5.0) as again:
        assert again.meta.group_id == groups[0].group_id


@pytest.mark.parametrize(("loss", "warned"), [("regular", True), ("rollout_is", False)])
def test_stale_rows_that_count_as_fresh_are_named_once(trained, capfd, loss, warned):
    groups = fully_recorded(loss_matrix(vocabulary=VOCABULARY))
    _, logged = trained(groups, f"trainer.algorithm.policy_loss_type={loss}", version=9)
    assert logged["shmbridge/rows_stale"] == 28
    said = [line for line in capfd.readouterr().err.splitlines() if "as if fresh" in line]
    assert len(said) == warned, "SkyRL writes what is logged to stderr"
    if warned:
        assert "28 rows of a step" in said[0]
        assert "-> trainer.algorithm.policy_loss_type=rollout_is" in said[0]
