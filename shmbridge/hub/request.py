"""What is asked of a batch, checked once and passed on whole: size, form, policy, screen, staleness."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from shmbridge.batch import Batch, Hold, Layout, MakeBatch, as_batch
from shmbridge.config import check_choice, check_count, check_seconds, check_timeout
from shmbridge.errors import BadArgument, shown
from shmbridge.record.groups import Group
from shmbridge.schema import Split

Screen = Callable[[Group], bool]
MOST_LAG = 7  # staleness values counted one by one; anything staler shares one bar
LAGS = (*map(str, range(MOST_LAG + 1)), f"over_{MOST_LAG}", "unknown")
_MOST_PREFETCHED = 1024
Policy = Literal["fair", "atropos", "oldest"]


@dataclass(frozen=True, slots=True)
class Want:
    """The size of a batch: a number of groups, or a number of rows (trajectories)."""

    groups: int | None
    rows: int | None

    def __post_init__(self) -> None:
        given = [
            (name, size) for name, size in (("groups", self.groups), ("rows", self.rows)) if size is not None
        ]
        if len(given) != 1:
            said = "groups and rows are both given" if given else "neither groups nor rows is given"
            raise BadArgument(f"the size of a batch: {said}", hint="groups=8, or rows=64")
        name, size = given[0]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            number = str(size).strip() if isinstance(size, str) else ""
            hint = f"{name}={number}, without quotes" if number.isdigit() else f"{name}=8"
            raise BadArgument(f"{name}={shown(size)} is no number of {name} from 1", hint=hint)

    def __str__(self) -> str:
        return f"{self.groups} groups" if self.rows is None else f"{self.rows} trajectories"

    @property
    def size(self) -> int:
        """The number of groups or rows; more than any memory holds is as good as 2**62."""
        return min(self.groups if self.groups is not None else self.rows or 0, 1 << 62)

    @property
    def by_rows(self) -> bool:
        """Whether the size counts rows (trajectories)."""
        return self.groups is None

    def as_groups(self, like: Sequence[Group]) -> int:
        """Returns how many groups that is, if all are like these."""
        if self.groups is not None:
            return self.groups
        return -(-(self.rows or 1) * len(like) // max(sum(group.size for group in like), 1))


def check_screen(keep: Screen | None) -> Screen | None:
    """Returns what Consumer.screen was given, or raises BadArgument."""
    if keep is not None and not callable(keep):
        raise BadArgument(f"keep={shown(keep)} cannot be called", hint="a function of a group, or None")
    return keep


def staleness(stamped: int, current: int) -> int:
    """Returns the versions between the stamped and the current one; 0 where either is unknown (-1)."""
    return max(current - stamped, 0) if stamped >= 0 and current >= 0 else 0


def is_stale(stamped: int, current: int, max_staleness: int | None) -> bool:
    """Returns whether a record exceeds the limit; None is no limit, and an unstamped record never does."""
    return max_staleness is not None and staleness(stamped, current) > max_staleness


def staleness_of(stamped: int, current: int) -> str:
    """Returns the histogram bar of a staleness: one of LAGS."""
    if stamped < 0 or current < 0:
        return "unknown"
    lag = staleness(stamped, current)
    return str(lag) if lag <= MOST_LAG else f"over_{MOST_LAG}"


class StalenessHistogram:
    """A histogram of groups' staleness at the hand-out of their batch. One thread counts; any may read."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(LAGS, 0)
        self._largest = 0
        self._ahead = 0

    def count(self, stamped: Iterable[int], current: int) -> None:
        """Counts groups by the version under which each began."""
        for version in stamped:
            self._counts[staleness_of(version, current)] += 1
            self._ahead += version > current
            self._largest = max(self._largest, staleness(version, current))

    def stats(self) -> dict[str, float]:
        """Returns `staleness_groups_total{lag}`, the largest staleness, and groups of future versions."""
        lags = {f"staleness_groups_total{{{lag}}}": count for lag, count in self._counts.items()}
        return {**lags, "staleness_max": self._largest, "policy_version_ahead_total": self._ahead}


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


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How groups are chosen for batches; see Consumer."""

    policy: Policy
    group_timeout_s: float
    allocation_wait_s: float
