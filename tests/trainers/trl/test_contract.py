"""What the loss of the real GRPOTrainer gets is what was put: tests/trainers/contract.py."""

from importlib.metadata import version

import numpy as np
import pytest
import torch

import shmbridge
from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func
from shmbridge.testing.fixtures import loss_matrix
from tests.trainers.contract import Seen, assert_contract, without_truncated


class Captured(ShmGRPOTrainer):
    """Keeps what TRL's own loss is called with, and the log-probabilities of the weights in training."""

    def _compute_loss(self, model, inputs):
        prompts, completions = inputs["prompt_ids"], inputs["completion_ids"]
        ids, mask = torch.cat([prompts, completions], 1), [inputs["prompt_mask"], inputs["completion_mask"]]
        assert ids.dtype == torch.int64
        with torch.no_grad():
            own, *_ = self._get_per_token_logps_and_entropies(
                model, ids, torch.cat(mask, 1), completions.size(1)
            )
        arrays = (inputs["tool_mask"], inputs["advantages"], inputs["old_per_token_logps"], own)
        for row, (prompt, real) in enumerate(zip(*(each.bool() for each in mask), strict=True)):
            tokens = torch.cat([prompts[row][prompt], completions[row][real]]).numpy()
            before = np.zeros(int(prompt.sum()))
            self.seen.append(
                Seen(tokens, *(np.concatenate([before, each[row][real].numpy()]) for each in arrays))
            )
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("", {"per_device_train_batch_size": 36}),
        ("three shuffled micro-batches, `loss_type=dapo`",
         {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 3, "loss_type": "dapo"}),
        ("`mask_truncated_completions=True`",
         {"per_device_train_batch_size": 36, "mask_truncated_completions": True}),
    ],
)  # fmt: skip
def test_the_loss_gets_what_was_put(bridge, tiny, settings, setting, changed):
    groups = loss_matrix()
    with shm_rollout_func(bridge, timeout_s=30) as rollouts:
        trainer = Captured(tiny, args=settings(**changed), rollout_func=rollouts)
        trainer.seen = []
        with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
            rollouts.publish(4)  # the version of the groups
            for group in groups:
                group.put(producer)
            trainer.train()
        stats = rollouts.stats()
    assert (stats["trl_rows_total"], stats["released_total"], stats["held"]) == (36, 11, 0)
    assert (stats["trl_rows_without_logprobs_total"], stats["trl_groups_fallback_total"]) == (7, 1)
    masked = "mask_truncated_completions" in changed
    ends = (stats["trl_rows_truncated_total"], stats["trl_rows_without_finish_reason_total"])
    assert ends == (2 * masked, 32 * masked)
    wanted = without_truncated(groups) if masked else groups
    assert_contract("TRL, `GRPOTrainer`", version("trl"), setting, wanted, trainer.seen)
