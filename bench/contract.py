"""The contract of a contender: a module with a Reader for this process and a Writer for others. Knows no
contender.

A contender's module has NAME (for tables), NEEDS (what must be importable) and INSTALL (how it gets there), a
`Reader(plan)` and a `Writer(address, plan)`. The address reaches a Writer through multiprocessing; a module
whose writers are no plain children has a `start` of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shmbridge.bench.groups import Form, Group, Shape, flat_columns
from shmbridge.bench.machine import CORES, LANE_BYTES, Cores

READ_TIMEOUT_S = 30.0  # for one group: after that a process must be dead
MODULO = 1 << 64

Take = Literal["get", "poll"]
Look = Literal["every byte", "nothing"]
Checksum = Literal["none", "crc32", "xxh3"]
Stores = Literal["plain", "past the cache"]
Condition = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """One measurement: the contender, the groups, the number of producers, the size of the memory.

    `take`, `look` and `checksum` are for the ring: which of its doors, whether the consumer reads the values,
    and a check over the bytes that the application makes on both sides. `stores` is for the limit: how its
    writer copies. `reads`: how often who reads in place reads every byte; several times, it is slower.
    """

    contender: str
    shape: Shape = field(default_factory=Shape)
    form: Form = "arrays"
    producers: int = 1
    lane_bytes: int = LANE_BYTES
    cores: Cores = CORES
    take: Take = "get"
    look: Look = "every byte"
    checksum: Checksum = "none"
    stores: Stores = "plain"
    reads: int = 1

    @property
    def in_flight(self) -> int:
        """Groups that fit in the memory all contenders get."""
        return max(2, self.lane_bytes // self.shape.bytes)


class Reader:
    """The consumer's side, in the process that measures. `address` tells a Writer where to go."""

    address: Any

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def read_one(self) -> int:
        """Takes the next group, reads every byte of its values with `touch`, gives it back; the sum.

        Blocks at most READ_TIMEOUT_S.
        """
        raise NotImplementedError

    def read(self, count: int) -> int:
        """`count` groups; the sum of all sums, modulo 2**64."""
        return sum(self.read_one() for _ in range(count)) % MODULO

    def close(self) -> None:
        """Gives everything back."""


class Writer:
    """A producer's side, in a process of its own, pinned before this is made."""

    def __init__(self, address: Any, plan: Plan) -> None:
        self.plan = plan

    def prepare(self, groups: list[Group]) -> list[Any]:
        """Returns the argument of `write_one` for a group: its columns as flat arrays.

        Not timed: a contender overrides it with the form in which a user of that transport would have groups.
        """
        return [flat_columns(group) for group in groups]

    def write_one(self, group: Any) -> None:
        """Hands over one group. Blocks while the reader has not kept up."""
        raise NotImplementedError

    def write(self, groups: list[Any], count: int) -> None:
        """`count` groups, those given in turn, from the first."""
        for n in range(count):
            self.write_one(groups[n % len(groups)])

    def close(self) -> None:
        """Gives everything back; what was written stays for the reader."""


class WriterProcess(Protocol):
    """A started producer as the measuring process sees it."""

    def ready(self) -> None:
        """Waits until it could begin."""

    def begin(self, count: int) -> None:
        """Tells it to write `count` groups; does not wait."""

    def end(self) -> float:
        """Waits until they are written; the CPU seconds that took it, threads that send in the background
        included.
        """

    def close(self) -> None:
        """Ends it."""


class Contender(Protocol):
    """A module of shmbridge.bench.baselines."""

    NAME: str
    NEEDS: tuple[str, ...]
    INSTALL: str
    Reader: type[Reader]
    Writer: type[Writer]
