"""The learner as a program that breaks: python breaking_learner.py WHERE NUMBER <the learner's options>.

WHERE is a place that raises from step NUMBER on; or "poison" or "abort", at a micro-batch with the token
NUMBER; or "large", which is out of memory with a micro-batch of more than NUMBER tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from shmbridge.consumers import grpo
from shmbridge.consumers.learner.train import grpo_update
from shmbridge.consumers.learner.train.grpo_update import Learner


def main() -> int:
    """Run the learner; return its exit status."""
    where, step = sys.argv[1], int(sys.argv[2])
    if where in ("poison", "abort", "large"):
        break_at_micro_batches(where, step)
        return grpo.main(sys.argv[3:])
    own = {"backward": torch.Tensor.backward, "update": torch.optim.AdamW.step}
    calls = 0
    applied = Learner.apply

    def counted(self: Learner) -> dict[str, object]:
        nonlocal calls
        calls = self.step + 1
        return applied(self)

    def oom(*args: object, **named: object) -> None:
        if calls + 1 >= step:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 79 GiB"
            )
        own["backward"](*args, **named)

    def bug(*args: object, **named: object) -> None:
        if calls + 1 >= step:
            raise IndexError("too many indices")
        own["backward"](*args, **named)

    def half(self: torch.optim.Optimizer, *args: object, **named: object) -> None:
        if calls >= step:
            with torch.no_grad():
                next(iter(self.param_groups[0]["params"])).add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        own["update"](self, *args, **named)

    Learner.apply = counted
    if where == "update":
        torch.optim.AdamW.step = half
    else:
        torch.Tensor.backward = {"memory": oom, "bug": bug}[where]
    return grpo.main(sys.argv[3:])


def break_at_micro_batches(how: str, number: int) -> None:
    """Plants the fault into the micro-batches of all steps."""
    made = grpo_update.micro_batches

    def breaking(*args: Any, **more: Any) -> Iterator[Any]:
        for micro in made(*args, **more):
            if how == "large" and micro.tokens.numel() > number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if how != "large" and bool((micro.tokens == number).any()):
                if how == "abort":
                    os.abort()
                raise FloatingPointError("the loss is not finite")
            yield micro

    grpo_update.micro_batches = breaking


if __name__ == "__main__":
    raise SystemExit(main())
