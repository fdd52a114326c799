"""Log-probabilities of a whole batch under a model, for a training loop of your own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import shmbridge
from shmbridge.consumers.losses.logprobs import chosen_logprobs, log_distribution


def batch_logprobs(model: Any, batch: shmbridge.Batch) -> Tensor:
    """Returns the log-probability of each token given those before it: float32, nats, shaped as
    `batch.tokens`, on the model's device.

    Value i belongs to token i, as in `batch.inference_logprobs`; the first token of a row, and padding, have
    0. Gradients flow into the model, unless within torch.no_grad(). Logits are divided by the column
    `temperature`, where a row has it. Rows are padded to the longest (B, T) and read with an attention mask,
    so rows of a packed batch do not see one another. Holds logits of (B, T, V) at once: for long rows see
    `chosen_logprobs_chunked`. Blocks for the model.

    Args:
        model: called as `model(input_ids=, attention_mask=)`, with right padding; returns logits (B, T, V),
            or an object with `logits`, as those of transformers.
        batch: packed or padded; may be released.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    lengths = torch.from_numpy(batch.lengths.astype(np.int64)).to(device)
    longest = int(batch.lengths.max(initial=0))
    there = torch.arange(longest, device=device) < lengths[:, None]
    tokens = torch.from_numpy(np.asarray(batch.tokens, np.int64)).to(device)
    if batch.layout == "packed":
        tokens = tokens.new_zeros(there.shape).masked_scatter(there, tokens)
    output = model(input_ids=tokens, attention_mask=there.long())
    logits = output if isinstance(output, Tensor) else output.logits
    found = torch.zeros(there.shape, dtype=torch.float32, device=device)
    if longest > 1:
        trained = there[:, 1:]
        temperature = _temperatures(batch).to(device)[:, None].expand(trained.shape)[trained]
        distribution = log_distribution(logits[:, :-1][trained], temperature)
        rest = found[:, 1:].masked_scatter(trained, chosen_logprobs(distribution, tokens[:, 1:][trained]))
        found = torch.cat([found[:, :1], rest], dim=1)
    return found if batch.layout == "padded" else found[there]


def _temperatures(batch: shmbridge.Batch) -> Tensor:
    """Returns the sampling temperature of each row, 1 where none is recorded: (B,) float32."""
    given = batch.temperature
    known = np.ones(len(batch), np.float32)
    if given is not None:
        known = np.where(batch.has("temperature") & (given > 0), given, 1.0).astype(np.float32)
    return torch.from_numpy(known)
