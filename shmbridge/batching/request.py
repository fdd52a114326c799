"""The request for batches: their size, form and largest staleness, checked once and passed on whole."""

from dataclasses import dataclass, replace
from typing import Self

from shmbridge.batch import Batch, Hold, Layout, MakeBatch, as_batch
from shmbridge.batching.batch_size import Want
from shmbridge.config import check_choice, check_count, check_timeout
from shmbridge.record.groups import Group

_MOST_PREFETCHED = 1024


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of Consumer.batches; `max_staleness` includes the off-policy limit."""

    size: Want
    layout: Layout = "packed"
    make: MakeBatch | None = None
    max_staleness: int | None = None
    hold: Hold = "step"
    prefetch: int = 0
    timeout_s: float | None = None

    def checked(self) -> Self:
        """Returns the request for an iteration, with plain numbers. Raises BadArgument or ValueError."""
        prefetch = check_count("prefetch", self.prefetch, 0, _MOST_PREFETCHED)
        timeout_s, max_staleness = check_timeout(self.timeout_s), self.max_staleness
        if min(max_staleness or 0, timeout_s or 0) < 0:
            raise ValueError(f"max_staleness={max_staleness}, timeout_s={timeout_s}: at least 0 each")
        check_choice("layout", self.layout, ("padded", "packed"))
        check_choice("hold", self.hold, ("step", "gather", "caller"))
        return replace(self, prefetch=prefetch, timeout_s=timeout_s)

    def batch_of(self, groups: list[Group]) -> Batch:
        """Returns the groups as a batch. Raises TypeError if `make` returns no batch."""
        return as_batch((self.make or Batch)(groups, self.layout))
