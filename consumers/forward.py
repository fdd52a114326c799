"""The log-probabilities of a micro-batch's trained tokens under a model.

Knows nothing of losses' meaning, of the bridge and of optimizers. Called by `grpo_update.py` and `reference.py`.

Letters: n trained tokens of a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shmbridge.consumers import losses
from shmbridge.consumers.microbatch import MicroBatch


def trained_logprobs(
    model: Any, micro: MicroBatch, *, precision: torch.dtype, chunk_tokens: int | None, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of the tempered policy at each trained token, with gradient. Blocks for the compute.

    The logits at position i - 1 predict token i; only those in front of a trained token are made float32.

    Args:
        model: a causal language model.
        micro: right-padded rows.
        precision: float32, or bfloat16 for an autocast forward pass.
        chunk_tokens: not used yet.
        with_entropy: return the entropy of each distribution too, with gradient.

    Returns:
        (n,) float32, nats, and the same of the entropy or None; n counts the trained tokens row after row.
    """
    with torch.autocast(micro.tokens.device.type, dtype=precision, enabled=precision != torch.float32):
        # A mask of ones says "nothing is padding", which causality makes true for every real token, and lets
        # the model take its fast causal kernel; without a mask it would look for packed rows and build one.
        output = model(input_ids=micro.tokens, attention_mask=torch.ones_like(micro.tokens), use_cache=False)
    trained = micro.trained[:, 1:]
    temperature = micro.temperature.unsqueeze(1).expand_as(trained)[trained]
    distribution = losses.log_distribution(output.logits[:, :-1][trained], temperature)
    chosen = losses.chosen_logprobs(distribution, micro.tokens[micro.trained])
    return chosen, losses.entropy(distribution) if with_entropy else None
