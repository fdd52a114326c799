"""Which complete groups go into the next batch: what a policy is, and which there are.

Knows groups and batch sizes; knows nothing of lanes, leases or layouts. Called by former.py. What the
policies do, and why: docs/explanation/scheduling.md.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol

from shmbridge.atropos.env_status import EnvWeight
from shmbridge.batching.atropos import AtroposScheduler
from shmbridge.batching.batch_size import Want as Want
from shmbridge.batching.fair import FairScheduler
from shmbridge.batching.oldest import OldestScheduler
from shmbridge.record.groups import Group

Policy = Literal["fair", "atropos", "oldest"]
# what the registered environments ask for, by producer id; an immutable snapshot
Shares = Callable[[], Mapping[str, EnvWeight]]


class Scheduler(Protocol):
    """Holds complete groups and chooses. Not thread-safe, but for `queued`, `len`, `formed` and `stats`.

    An exception, of a signal handler say, may end a call anywhere: then `recount` comes before the next call.
    Until then a group is in one place or in none, never in two.
    """

    @property
    def waits_until_s(self) -> float:
        """time.monotonic() at which a batch is formed without what it still waits for; infinite if it waits
        for nothing in particular.
        """

    @property
    def formed(self) -> int | None:
        """Batches formed, where those are the steps of a run; None where the batches handed out are."""

    def look_ahead(self, lanes: int) -> bool:
        """Whether it can only choose well if it sees everything that so many lanes hold, before anything is
        taken from it.
        """

    def add(self, group: Group) -> None:
        """Queues a complete group behind the others."""

    def put_back(self, groups: list[Group]) -> None:
        """Returns groups of a batch that was not handed out: they come again before all others, in their
        order.

        O(1) per group.
        """

    def take(self, want: Want, now_s: float, *, last: bool) -> list[Group] | None:
        """The groups of the next batch; None while there is none. `last`: no more groups can come."""

    def remove(self, unfit: Callable[[Group], bool]) -> list[Group]:
        """Takes out and returns what is unfit. Looks at every group."""

    def recount(self) -> None:
        """Makes its counts those of the groups it holds: an exception ended a call half-way.

        A group that was on its way is not here.
        """

    def queued(self, producer_id: str) -> int:
        """Groups of one producer that wait here."""

    def stats(self) -> dict[str, float]:
        """What it counts."""

    def __len__(self) -> int:
        """Groups that wait here."""

    def __iter__(self) -> Iterator[Group]:
        """All groups it holds, in no promised order."""


def scheduler_of(
    policy: Policy, shares: Shares, is_live: Callable[[str], bool], allocation_wait_s: float
) -> Scheduler:
    """A scheduler of that policy. `is_live` says whether a producer may still put something.

    Raises ValueError for one there is not.
    """
    if policy == "fair":
        return FairScheduler(shares, is_live, allocation_wait_s)
    if policy == "atropos":
        return AtroposScheduler(shares)
    if policy == "oldest":
        return OldestScheduler()
    raise ValueError(f'policy={policy!r} is not "fair", "atropos" or "oldest"')
