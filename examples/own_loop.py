"""A GRPO training loop of one's own: batches from a bridge, a loss, weights back. It starts numpy_env.py.

    python examples/own_loop.py [BRIDGE]        # default: a bridge of its own

`kill -9` it and start it again on the same bridge: it goes on with the newest weights that it had published.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

import shmbridge
from shmbridge.consumers import losses
from shmbridge.consumers.advantages import group_advantages, spread_to_tokens
from shmbridge.weights import WeightsReader, WeightsWriter

STEPS = 60
model = torch.nn.Embedding(16, 16, _weight=torch.zeros(16, 16))  # a token -> logits of the next token
optimizer = torch.optim.Adam(model.parameters(), lr=0.2)


def batch_logprobs(batch: shmbridge.Batch) -> torch.Tensor:
    """The log-probability of each token under the model: (N,), value i belongs to token i."""
    tokens = torch.from_numpy(batch.tokens).long()
    distribution = losses.log_distribution(model(tokens[:-1]), torch.ones(len(tokens) - 1))
    return torch.nn.functional.pad(losses.chosen_logprobs(distribution, tokens[1:]), (1, 0))


def train_step(batch: shmbridge.Batch) -> None:
    rows = group_advantages(batch.scores, batch.group_index)  # (B,): each score against its group's mean
    advantages = spread_to_tokens(rows, batch.cu_seqlens, batch.loss_mask)  # (N,): one per token
    given = (batch.inference_logprobs, advantages, batch.loss_mask.astype(bool), batch.cu_seqlens)
    loss = losses.grpo_loss(batch_logprobs(batch), *map(torch.from_numpy, given))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


bridge = sys.argv[1] if len(sys.argv) > 1 else f"own-loop-{os.getpid()}"
with shmbridge.Consumer(bridge) as consumer, WeightsWriter(bridge) as weights:
    if (reader := WeightsReader(bridge)).version is not None:  # an earlier loop's
        model.weight.data = torch.from_numpy(reader.copy()[1]["weight"])
    begun = weights.last_version or 0
    played = [sys.executable, Path(__file__).with_name("numpy_env.py"), bridge, "1000000"]
    with subprocess.Popen(played):
        for step, batch in enumerate(consumer.batches(groups=8, max_staleness=8, timeout_s=60), start=1):
            with batch:  # its end releases the batch: it was trained
                train_step(batch)
                weights.publish(begun + step, model.state_dict().items())
                consumer.publish_policy_version(begun + step)
            if step % 10 == 0:
                print(f"step {step}: mean score {batch.scores.mean():.2f}", flush=True)
            if step == STEPS:
                break
        consumer.drain()  # the run is over: environments end
if len(sys.argv) == 1:
    shmbridge.clean(bridge, dry_run=False)  # groups that were put after the last step
