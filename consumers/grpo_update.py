"""One GRPO update: a packed batch in, a gradient and an optimizer step out.

Knows nothing of the bridge, of processes or of files. Called by the GRPO learner (`grpo.py`), and by programs
that bring their own batches.

What differs from the GRPO paper (arXiv 2402.03300):
1. the loss is a mean over tokens, not over answers, and the two clip bounds are separate (DAPO, 2503.14476);
2. no KL term; an entropy bonus instead, off by default;
3. advantages that an environment wrote per token replace those from the scores, row by row;
4. one update per batch: the ratio corrects for staleness, not for epochs.

Letters: n trained tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmbridge.consumers import losses
from shmbridge.consumers.metrics_log import Metrics
from shmbridge.consumers.microbatch import MicroBatch, micro_batches
from shmbridge.consumers.sharding import Parallel
from shmbridge.consumers.training_rows import NO_LOGPROB, TrainingRows, prepare


@dataclass(frozen=True)
class Objective:
    """What is optimised, and how large a piece of it one forward pass takes."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy: float = 0.0  # weight of the mean token entropy
    temperature: float = 1.0  # of rows whose record does not say
    micro_tokens: int = 8192  # of one forward pass, padding included
    precision: torch.dtype = torch.float32  # of the forward pass; parameters are float32
    use_advantages: bool = True  # of the records, where they have them
    fallback_to_grpo: bool = True  # where they have none

_IDLE = TrainingRows(
    tokens=np.zeros(2, np.int32),
    cu_seqlens=np.array([0, 2], np.int32),
    trained=np.array([False, True]),
    advantages=np.zeros(2, np.float32),
    sampled_logprobs=np.full(2, NO_LOGPROB, np.float32),
    temperature=np.ones(1, np.float32),
)  # what a rank computes that has nothing to train


def predict(model: Any, micro: MicroBatch, precision: torch.dtype) -> Tensor:
    """Return the log-probabilities of the tempered policy at each trained token of a micro-batch.

    The logits at position i - 1 predict token i; only those in front of a trained token are made float32.

    Args:
        model: a causal language model.
        micro: right-padded rows.
        precision: float32, or bfloat16 for an autocast forward pass.

    Returns:
        (n, V) float32, nats; n counts the trained tokens row after row, as `micro.trained` selects them.
    """
    with torch.autocast(micro.tokens.device.type, dtype=precision, enabled=precision != torch.float32):
        # A mask of ones says "nothing is padding", which causality makes true for every real token, and lets
        # the model take its fast causal kernel; without a mask it would look for packed rows and build one.
        output = model(input_ids=micro.tokens, attention_mask=torch.ones_like(micro.tokens), use_cache=False)
    trained = micro.trained[:, 1:]
    temperature = micro.temperature.unsqueeze(1).expand_as(trained)[trained]
    return losses.log_distribution(output.logits[:, :-1][trained], temperature)


class Learner:
    """A model, its optimizer and the count of steps done; turns batches into updates.

    Args:
        model: a Hugging Face causal language model in float32, on its device.
        objective: what to optimise.
        learning_rate: step (0-based) -> learning rate.
        weight_decay: of AdamW.
        max_grad_norm: the gradient's norm is clipped to this.
        parallel: how the ranks share the model; None: there is one.
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        learning_rate: Callable[[int], float],
        *,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        parallel: Parallel | None = None,
    ) -> None:
        self.model = model
        self._parallel = parallel or Parallel(model)
        self.objective = objective
        self.step = 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay
        )
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm

    def accumulate(self, batch: Any) -> Metrics:
        """Leave the gradient of one batch in the parameters, whose values stay. Blocks for the compute.

        Raises:
            ValueError: a token id outside the model's vocabulary.
            NoAdvantages: a group needs the fallback that the objective does not allow.
        """
        world = self._parallel.world
        with world.together():
            rows, metrics = prepare(
                batch,
                self.objective.temperature,
                use_advantages=self.objective.use_advantages,
                fallback_to_grpo=self.objective.fallback_to_grpo,
            )
            self._check_vocabulary(rows)
        token_count = int(world.sum(np.array([rows.trained_count], np.float64))[0])
        self.optimizer.zero_grad(set_to_none=True)
        device = next(self.model.parameters()).device
        totals = torch.zeros(4, device=device)
        budget = self.objective.micro_tokens
        for micro in self._parallel.rounds(micro_batches(rows, budget, device)):
            if micro is None:
                self._take_part(next(micro_batches(_IDLE, budget, device)))
            else:
                totals += self._backward(micro, token_count)
        policy_loss, entropy, ratio, clipped = world.sum(totals.double().cpu().numpy()).tolist()
        return {
            "loss": policy_loss - self.objective.entropy * entropy,
            "policy_loss": policy_loss,
            "entropy": entropy,
            "ratio_mean": ratio,
            "clip_frac": clipped,
            **metrics,
        }

    def apply(self) -> Metrics:
        """Take the optimizer step of the accumulated gradient; one that is not finite changes nothing."""
        rate = self._learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm).item()
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.step += 1
        return {"step": self.step, "lr": rate, "grad_norm": norm, "update_skipped": not finite}

    def _check_vocabulary(self, rows: TrainingRows) -> None:
        # On a GPU an id out of range kills the process with an assertion that names nobody.
        size = self.model.get_input_embeddings().num_embeddings
        if rows.tokens.size and not 0 <= rows.tokens.min() <= rows.tokens.max() < size:
            raise ValueError(
                f"token ids from {rows.tokens.min()} to {rows.tokens.max()}, but the model has {size}: "
                "the environments use another tokenizer than the learner"
            )

    def _take_part(self, micro: MicroBatch) -> None:
        """A forward and a backward that leave every gradient as it is: the other ranks have one micro-batch more."""
        self._parallel.backward(self._parallel(predict, micro, self.objective.precision).sum() * 0.0)

    def _backward(self, micro: MicroBatch, token_count: int) -> Tensor:
        """Add one micro-batch's share of the gradient; return its shares of the metrics."""
        goal = self.objective
        log_probabilities = self._parallel(predict, micro, goal.precision)
        trained = micro.trained
        logprobs = losses.chosen_logprobs(log_probabilities, micro.tokens[trained])
        ratio = losses.importance_ratio(logprobs, micro.sampled_logprobs[trained])
        advantages = micro.advantages[trained]

        policy = losses.clipped_policy_loss(ratio, advantages, goal.clip_low, goal.clip_high)
        with torch.set_grad_enabled(goal.entropy != 0.0):  # only a metric otherwise: spare its (n, V) memory
            entropy = losses.entropy(log_probabilities)
        self._parallel.backward(losses.token_mean(policy - goal.entropy * entropy, token_count))

        clipped = losses.clipped(ratio, advantages, goal.clip_low, goal.clip_high).float()
        shares = torch.stack([values.detach() for values in (policy, entropy, ratio, clipped)])
        return shares.sum(dim=1) / max(token_count, 1)


def learning_rate_at(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Return the rate of a 0-based step: up to the peak over the warm-up, then in a line to 0 at `steps`."""
    rising = (step + 1) / max(warmup, 1)
    falling = (steps - step) / max(steps - warmup, 1)
    return peak * max(0.0, min(1.0, rising, falling))
