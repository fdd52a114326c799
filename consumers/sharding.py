"""How the ranks share one model: every rank has all of it (DDP), or a part of each tensor (FSDP2), or there is one.

Knows torch's wrappers, and nothing of losses, batches or files. Called by `grpo_update.py`, `publishing.py` and
`checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from shmbridge.consumers.world import ALONE, World

Micro = TypeVar("Micro")
Result = TypeVar("Result")


class Parallel:
    """A model that one process has for itself.

    Args:
        model: any module.
    """

    world: World = ALONE

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, compute: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Return `compute(model, *args, **named)`; whatever needs the model's gradient goes through here."""
        return compute(self.model, *args, **named)

    def rounds(self, micros: Iterable[Micro]) -> Iterator[Micro | None]:
        """Yield this rank's micro-batches, then None as often as other ranks have more: take part in those, too.

        Run the forward and the backward of each before the next.
        """
        return iter(micros)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of a loss that is a sum over all ranks."""
        loss.backward()
