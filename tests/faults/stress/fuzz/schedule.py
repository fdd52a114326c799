"""Who is killed or stopped, when, and what comes after: decided by the seed alone, not by what happens.

Knows numbers of slots and seconds; knows nothing of processes.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

CONSUMER = -1


class Act(Enum):
    KILL = "kill"
    KILL_RUNNING = "kill running"  # the next producer from this slot on that is in the middle of something
    CLOSE = "close"  # the end of a producer that is not killed
    STOP = "stop"  # and go on after for_s
    STOP_AND_KILL = "stop and kill"  # after for_s
    KILL_ALL = "kill all"


@dataclass(frozen=True)
class Event:
    """At `at_s` of its phase. `soon_s`: delays after which the successors of the victim are killed, too."""

    at_s: float
    act: Act
    slot: int
    for_s: float = 0.0
    soon_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Phase:
    """`kind`: "calm" every other producer is closed and replaced now and then, "victims" it is killed
    instead, "chaos" hits all processes.
    """

    kind: str
    seconds: float


def phases(seconds: float, producers: int) -> list[Phase]:
    """Calm and victims in turn, so that a machine that slows down slows both; chaos in pieces, between which
    everything is counted.
    """
    plan: list[Phase] = []
    if producers > 1:
        pairs = 4 if seconds >= 60 else 1
        plan += [
            Phase(kind, 0.3 * seconds / (2 * pairs)) for _ in range(pairs) for kind in ("calm", "victims")
        ]
    chaos = seconds - sum(phase.seconds for phase in plan)
    pieces = max(2, round(chaos / 15))
    return plan + [Phase("chaos", chaos / pieces)] * pieces


@dataclass(frozen=True)
class Successor:
    """It comes after `after_s`; a producer ends by itself after `most` records, a consumer takes batches of
    `groups`, if not 0.
    """

    after_s: float
    most: int | None = None
    groups: int = 0


class Schedule:
    """The schedule of one run. The draws of a phase or a successor depend on the seed and its number, not on
    earlier draws.
    """

    def __init__(self, seed: int, seconds: float, producers: int) -> None:
        self._seed, self._producers = seed, producers
        self._random = random.Random()
        short = seconds < 60
        self._producer_kills_hz = max(0.14 * producers, 3.0 if short else 1.0)
        self._consumer_kills_hz = 2.0 if short else 0.15
        self._all_hz = 0.3 if short else 0.02

    def events(self, index: int, phase: Phase) -> list[Event]:
        """Returns the events of the run's phase `index`, in order of time."""
        self._random.seed(f"{self._seed}/phase/{index}")
        found = list(self._of(self._producer_kills_hz, phase.seconds, self._kill_producer))
        if phase.kind == "calm":
            found = [Event(each.at_s, Act.CLOSE, each.slot & ~1) for each in found]
        elif phase.kind == "victims":
            found = [Event(each.at_s, Act.KILL, each.slot & ~1) for each in found]
        else:
            found += self._of(self._producer_kills_hz / 3, phase.seconds, self._stop_producer)
            found += self._of(self._consumer_kills_hz, phase.seconds, self._kill_consumer)
            found += self._of(self._consumer_kills_hz / 2, phase.seconds, self._stop_consumer)
            found += self._of(self._all_hz, phase.seconds, lambda at_s: Event(at_s, Act.KILL_ALL, CONSUMER))
        return sorted(found, key=lambda each: each.at_s)

    def successor(self, slot: int, life: int, phase: Phase) -> Successor:
        """Returns the properties of the next process in this slot."""
        draw = random.Random(f"{self._seed}/successor/{slot}/{life}")
        after_s = draw.choice((0.0, 0.0, 0.0, draw.uniform(0.0, 0.05)))
        if phase.kind != "chaos":
            return Successor(after_s)
        most = draw.randint(1, 3000) if draw.random() < 0.15 else None
        groups = (16 if self._producers >= 8 else 2) if draw.random() < 0.4 else 0
        return Successor(after_s, most, groups)

    def _of(self, rate_hz: float, seconds: float, make: Callable[[float], Event]) -> Iterator[Event]:
        at_s = self._random.expovariate(rate_hz)
        while at_s < seconds:
            yield make(at_s)
            at_s += self._random.expovariate(rate_hz)

    def _soon(self, chance: float, longest_s: float) -> tuple[float, ...]:
        if self._random.random() > chance:
            return ()
        return tuple(self._random.uniform(0.0, longest_s) for _ in range(self._random.randint(1, 3)))

    def _kill_producer(self, at_s: float) -> Event:
        act = self._random.choice((Act.KILL, Act.KILL_RUNNING))
        return Event(at_s, act, self._random.randrange(self._producers), soon_s=self._soon(0.15, 0.012))

    def _stop_producer(self, at_s: float) -> Event:
        act = self._random.choice((Act.STOP, Act.STOP, Act.STOP, Act.STOP_AND_KILL))
        return Event(
            at_s, act, self._random.randrange(self._producers), min(self._random.expovariate(8.0), 1.5)
        )

    def _kill_consumer(self, at_s: float) -> Event:
        return Event(at_s, Act.KILL, CONSUMER, soon_s=self._soon(0.35, 0.04))

    def _stop_consumer(self, at_s: float) -> Event:
        act = self._random.choice((Act.STOP, Act.STOP, Act.STOP_AND_KILL))
        return Event(at_s, act, CONSUMER, min(self._random.expovariate(8.0), 1.0))
