"""The request for batches: their size, form and largest staleness, checked once and passed on whole."""

from dataclasses import dataclass, replace
from typing import Self

from shmbridge.batch import Batch, Hold, Layout, MakeBatch, as_batch
from shmbridge.batching.batch_size import Want
from shmbridge.config import check_choice, check_count, check_seconds, check_timeout
from shmbridge.errors import BadArgument
from shmbridge.record.groups import Group
from shmbridge.schema import Split
from shmbridge.shown import shown

_MOST_PREFETCHED = 1024


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of Consumer.batches; `max_staleness` includes the off-policy limit.

    Raises BadArgument for an unknown split.
    """

    size: Want
    layout: Layout = "packed"
    make: MakeBatch | None = None
    max_staleness: int | None = None
    split: Split | None = "train"
    hold: Hold = "step"
    prefetch: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.split is not None:
            check_choice("split", self.split, ("train", "eval"))

    def checked(self) -> Self:
        """Returns the request for an iteration, with plain numbers. Raises BadArgument."""
        prefetch = check_count("prefetch", self.prefetch, 0, _MOST_PREFETCHED)
        timeout_s = check_timeout(self.timeout_s)
        if timeout_s is not None and timeout_s < 0:
            check_seconds("timeout_s", timeout_s)
        if self.make is not None and not callable(self.make):
            raise BadArgument(
                f"make={shown(self.make)} cannot be called",
                hint="make=a function of (groups, layout), or a Batch class",
            )
        check_choice("layout", self.layout, ("padded", "packed"))
        check_choice("hold", self.hold, ("step", "gather", "caller"))
        return replace(self, prefetch=prefetch, timeout_s=timeout_s)

    def batch_of(self, groups: list[Group]) -> Batch:
        """Returns the groups as a batch. Raises TypeError if `make` returns no batch."""
        return as_batch((self.make or Batch)(groups, self.layout))
