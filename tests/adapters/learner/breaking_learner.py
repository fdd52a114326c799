"""The learner as a program that raises at a given place of a given step: python breaking_learner.py WHERE
STEP <the learner's options>.
"""

from __future__ import annotations

import sys

import torch

from shmbridge.consumers import grpo
from shmbridge.consumers.learner.train.grpo_update import Learner


def main() -> int:
    """Run the learner; return its exit status."""
    where, step = sys.argv[1], int(sys.argv[2])
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


if __name__ == "__main__":
    raise SystemExit(main())
