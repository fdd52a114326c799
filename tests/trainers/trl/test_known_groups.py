"""What the producers put is what the loss of the real GRPOTrainer gets, position by position."""

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func


class Seen(ShmGRPOTrainer):
    """Keeps what TRL's own loss is called with, and what the model makes of it."""

    def _compute_loss(self, model, inputs):
        self.seen = getattr(self, "seen", [])
        with torch.no_grad():
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            own, _, _ = self._get_per_token_logps_and_entropies(
                model, ids, mask, inputs["completion_ids"].size(1)
            )
        self.seen.append({name: value.clone() for name, value in inputs.items()} | {"own": own})
        return super()._compute_loss(model, inputs)


def rows_seen(inputs) -> dict[tuple[int, ...], dict[str, np.ndarray]]:
    """Row's tokens -> its arrays, full length and unshifted; padding is cut off."""
    found = {}
    for row in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row] == 1].tolist()
        real = inputs["completion_mask"][row] == 1
        completion = inputs["completion_ids"][row][real].tolist()
        assert not (inputs["tool_mask"][row] * inputs["completion_mask"][row])[~real].any()
        assert not inputs["advantages"][row][~real].any()
        cut = np.zeros(len(prompt), np.float32)
        arrays = {
            name: np.concatenate([cut, inputs[name][row][real].numpy()])
            for name in ("advantages", "tool_mask", "old_per_token_logps", "own")
        }
        found[tuple(prompt + completion)] = arrays
    return found


def compare(groups, found, shifted: str = "") -> float:
    """Asserts that every row arrived; returns the largest difference. One array may be shifted by a token."""
    rows = [row for group in groups for row in group.rows]
    assert len(found) == len(rows)
    largest = 0.0
    for row in rows:
        got, at = dict(found[tuple(row.tokens.tolist())]), row.trained
        if shifted:
            got[shifted] = np.roll(got[shifted], 1)
        np.testing.assert_array_equal(got["tool_mask"] != 0, at)
        wanted = got["own"] if row.logprobs is None else row.logprobs
        for name, values in (("advantages", row.advantages), ("old_per_token_logps", wanted)):
            np.testing.assert_allclose(got[name][at], values[at], rtol=1e-6, err_msg=name)
            largest = max(largest, *np.abs(got[name] - values)[at].tolist(), 0.0)
    return largest


@pytest.fixture
def inputs(bridge, tiny, settings, known):
    """What TRL's loss got of the known groups, all in one batch."""
    with shm_rollout_func(bridge, timeout_s=30) as rollouts:
        args = settings(per_device_train_batch_size=20, loss_type="grpo")
        trainer = Seen(tiny, args=args, rollout_func=rollouts)
        with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
            rollouts.publish(4)  # the version of the known groups
            for group in known:
                group.put(producer)
            trainer.train()
        stats = rollouts.stats()
    assert (stats["trl_rows_total"], stats["released_total"], stats["held"]) == (20, 6, 0)
    assert (stats["trl_rows_without_logprobs_total"], stats["trl_groups_fallback_total"]) == (4, 1)
    (seen,) = trainer.seen
    return seen


def test_the_loss_gets_what_was_put(known, inputs):
    largest = compare(known, rows_seen(inputs))
    print(f"largest difference {largest:.1e}")
    assert largest < 1e-6
    assert inputs["prompt_ids"].dtype == inputs["completion_ids"].dtype == torch.int64


@pytest.mark.parametrize("shifted", ["advantages", "tool_mask", "old_per_token_logps"])
def test_a_shift_by_one_would_be_seen(known, inputs, shifted):
    with pytest.raises(AssertionError):
        compare(known, rows_seen(inputs), shifted)
