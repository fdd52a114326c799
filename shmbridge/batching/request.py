"""The request for batches: their size, form and largest staleness, checked once and passed on whole."""

from dataclasses import dataclass
from typing import Self

from shmbridge.batch import Batch, Hold, Layout, MakeBatch, as_batch
from shmbridge.batching.batch_size import Want
from shmbridge.config import check_choice, check_count, check_timeout
from shmbridge.record.groups import Group

_MOST_PREFETCHED = 1024


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of Consumer.batches; `max_staleness` is at most what the consumer's off-policy limit
    allows.
    """

    size: Want
    layout: Layout = "packed"
    make: MakeBatch | None = None
    max_staleness: int | None = None
    hold: Hold = "step"
    prefetch: int = 0
    timeout_s: float | None = None

    @classmethod
    def checked(
        cls,
        size: Want,
        *,
        layout: Layout,
        make: MakeBatch | None,
        max_staleness: int | None,
        hold: Hold,
        prefetch: int,
        timeout_s: float | None,
    ) -> Self:
        """Returns a checked request for an iteration. Raises BadArgument or ValueError."""
        prefetch, timeout_s = check_count("prefetch", prefetch, 0, _MOST_PREFETCHED), check_timeout(timeout_s)
        if min(max_staleness or 0, timeout_s or 0) < 0:
            raise ValueError(f"max_staleness={max_staleness}, timeout_s={timeout_s}: at least 0 each")
        check_choice("layout", layout, ("padded", "packed"))
        check_choice("hold", hold, ("step", "gather", "caller"))
        return cls(size, layout, make, max_staleness, hold, prefetch, timeout_s)

    def batch_of(self, groups: list[Group]) -> Batch:
        """Returns the groups as a batch. Raises TypeError if `make` returns no batch."""
        return as_batch((self.make or Batch)(groups, self.layout))
