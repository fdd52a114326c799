"""The processes that train one model together: who this one is, and the few words they exchange.

Numbers and short texts only, through the host; gradients and parameters are `sharding.py`'s. Knows nothing of
models, batches or the bridge. Called by the GRPO learner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt


class World:
    """The only process of a learner: what all ranks say is what it says itself."""

    rank = 0
    size = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that is the hub, writes files and speaks to people."""
        return self.rank == 0

    def sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sum over all ranks, value by value. Blocks for the others."""
        return values

    def most(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the largest over all ranks, value by value. Blocks for the others."""
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all ranks finish the block, or raise on all of them if it fails on any. Blocks for the others."""
        yield


ALONE = World()
