"""Sampler mismatch: how far the sampler's and the trainer's log-probabilities of the same tokens differ.

Tokens sampled by the version being trained are called fresh. For them both policies have the same weights, so
a difference is a fault: raw log-probabilities, another temperature, an engine that did not load the weights.

Letter: n trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shmbridge.consumers import losses
from shmbridge.consumers.advantages.whole_batch import Reduce, alone
from shmbridge.consumers.learner.types import Metrics

_OF = ("mismatch_kl", "logprob_diff_mean", "logprob_diff_max")
MISMATCH = (*_OF, *(f"{name}_fresh" for name in _OF), "tokens_fresh")
_UNSEEN_STEPS = 10  # warn after this many steps without a fresh token


class Mismatch:
    """Sums the differences over a step's trained tokens whose sampler log-probability is known."""

    def __init__(self) -> None:
        # sums over all ranks; rows: all tokens, fresh tokens; columns: count, divergence, distance
        self._sums = np.zeros((2, 3))
        self._largest = np.zeros(2)
        # of this rank and batch, (2, 4) on the device: the same sums, and the largest distance
        self._own: list[Tensor] = []

    def add(self, logprobs: Tensor, sampled_logprobs: Tensor, fresh: Tensor | None) -> None:
        """Counts a micro-batch. Never blocks.

        Args:
            logprobs: (n,) nats, under the policy about to be updated, without gradient.
            sampled_logprobs: (n,) nats, recorded when the token was sampled; NaN where unknown.
            fresh: (n,) bool, token_versions says that the trained version sampled the token; None: unknown.
        """
        known = losses.known(sampled_logprobs)
        apart = torch.where(known, (logprobs - sampled_logprobs).abs(), 0.0).double()
        # The tokens were drawn by the sampler, so this estimates KL(sampler || policy).
        divergence = losses.kl_estimate(
            torch.where(known, sampled_logprobs, logprobs).double(), logprobs.double(), "k3"
        )
        rows = []
        for counted in (known, torch.zeros_like(known) if fresh is None else known & fresh):
            distance = torch.where(counted, apart, 0.0)
            largest = torch.nn.functional.pad(distance, (0, 1)).max()
            rows.append(
                torch.stack(
                    [
                        counted.sum().double(),
                        torch.where(counted, divergence, 0.0).sum(),
                        distance.sum(),
                        largest,
                    ]
                )
            )
        self._own.append(torch.stack(rows))

    def metrics(self, reduce: Reduce = alone) -> Metrics:
        """Returns the metrics of all batches so far; NaN without tokens. Maxima are of this rank alone.

        Blocks as long as `reduce`, the sum of an array over all ranks; every rank calls it once.
        """
        own = torch.stack(self._own).cpu().numpy() if self._own else np.zeros((1, 2, 4))
        self._own = []
        self._sums += reduce(own[..., :3].sum(axis=0))
        self._largest = np.maximum(self._largest, own[..., 3].max(axis=0))
        found: Metrics = {}
        for (count, divergence, distance), largest, suffix in zip(
            self._sums.tolist(), self._largest.tolist(), ("", "_fresh"), strict=True
        ):
            values = (divergence / count, distance / count, largest) if count else (float("nan"),) * 3
            found |= {f"{name}{suffix}": value for name, value in zip(_OF, values, strict=True)}
        return found | {"tokens_fresh": self._sums[1, 0].item()}


class MismatchAlarm:
    """Warns if fresh tokens differ by more than `limit` nats in the mean (0: never), or if none is fresh."""

    def __init__(self, limit: float, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        self._above = False
        self._total = 0
        self._unseen = 0  # steps with log-probabilities but no fresh token, until the first fresh one

    def looked(self, measured: Metrics) -> Metrics:
        """Reads a step's metrics; returns how many steps were above the limit, and warns of the first."""
        self._look_for_fresh(measured)
        mean = measured.get("logprob_diff_mean_fresh", float("nan"))
        above = bool(self._limit) and mean > self._limit
        self._total += above
        if above and not self._above:
            self._say(
                f"the sampler is not the policy: over {measured['tokens_fresh']:.0f} tokens of this very "
                f"version their log-probabilities are {mean:.3g} nats apart in the mean, "
                f"{measured['logprob_diff_max_fresh']:.3g} at most (--mismatch-warn {self._limit:g}) -> "
                "does the engine report processed log-probabilities, of the temperature that the record "
                "says, without top_p and top_k, and does it have the newest weights?"
            )
        self._above = above
        return {"mismatch_alarms_total": self._total}

    def _look_for_fresh(self, measured: Metrics) -> None:
        """Warns once that nothing is compared, if some steps had log-probabilities but no fresh token."""
        if (
            not self._limit
            or self._unseen >= _UNSEEN_STEPS
            or math.isnan(measured.get("logprob_diff_mean", float("nan")))
        ):
            return
        self._unseen = _UNSEEN_STEPS if measured.get("tokens_fresh") else self._unseen + 1
        if self._unseen == _UNSEEN_STEPS and not measured.get("tokens_fresh"):
            self._say(
                f"whether the sampler is the policy is not looked at: in {_UNSEEN_STEPS} steps no token "
                "named the version being trained -> write token_versions, the version that each token was "
                "sampled with; where they are there, all were older"
            )
