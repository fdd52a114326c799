"""The scheduler protocol, and the policies that choose complete groups for the next batch.

Used by former.py. The policies and their reasons: docs/explanation/scheduling.md.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from shmbridge.atropos.env_status import EnvWeight
from shmbridge.batching.atropos import AtroposScheduler
from shmbridge.batching.batch_size import Want as Want
from shmbridge.batching.fair import FairScheduler
from shmbridge.batching.oldest import OldestScheduler
from shmbridge.config import check_choice
from shmbridge.record.groups import Group

Policy = Literal["fair", "atropos", "oldest"]


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How groups are chosen for batches; see Consumer."""

    policy: Policy
    group_timeout_s: float
    allocation_wait_s: float


# Returns the shares requested by the registered environments, by producer id; an immutable snapshot.
Shares = Callable[[], Mapping[str, EnvWeight]]


class Scheduler(Protocol):
    """Holds complete groups and chooses. Not thread-safe, except `queued`, `len`, `formed` and `stats`.

    An exception, for example of a signal handler, may end a call anywhere; `recount` is then called before
    the next call. Until then a group is in one place or in none, never in two.
    """

    @property
    def waits_until_s(self) -> float:
        """time.monotonic() until which a batch waits for certain groups; infinite if it waits for none."""

    @property
    def formed(self) -> int | None:
        """Batches formed, if those are the steps of a run; None if the batches handed out are."""

    def look_ahead(self, lanes: int) -> bool:
        """Returns whether choosing well needs every record in `lanes` lanes to be added before `take`."""

    def add(self, group: Group) -> None:
        """Queues a complete group behind the others."""

    def put_back(self, groups: list[Group]) -> None:
        """Returns groups of a batch that was not handed out to the queue, before all others, in their order.

        O(1) per group.
        """

    def take(self, want: Want, now_s: float, *, last: bool) -> list[Group] | None:
        """Returns the groups of the next batch; None while there is none. `last`: no more groups can come."""

    def remove(self, unfit: Callable[[Group], bool]) -> list[Group]:
        """Removes and returns the unfit groups. Checks every group."""

    def recount(self) -> None:
        """Recomputes its counts from the groups it holds, after an exception ended a call half-way.

        A group in transit then is not here.
        """

    def queued(self, producer_id: str) -> int:
        """Returns the queued groups of one producer."""

    def stats(self) -> dict[str, float]:
        """Returns its counters."""

    def __len__(self) -> int:
        """Returns the number of queued groups."""

    def __iter__(self) -> Iterator[Group]:
        """Iterates over all groups it holds, in no promised order."""


def scheduler_of(
    policy: Policy, shares: Shares, is_live: Callable[[str], bool], allocation_wait_s: float
) -> Scheduler:
    """Returns a scheduler of that policy. `is_live` says whether a producer may still put something.

    Raises BadArgument for an unknown policy.
    """
    check_choice("policy", policy, ("fair", "atropos", "oldest"))
    if policy == "fair":
        return FairScheduler(shares, is_live, allocation_wait_s)
    if policy == "atropos":
        return AtroposScheduler(shares)
    return OldestScheduler()
