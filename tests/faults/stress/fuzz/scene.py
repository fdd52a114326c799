"""One bridge and the children on it, for the fuzzes whose readers run side by side: who is started, ended,
and judged.

Knows processes, logs and the referee of words; knows nothing of what the children do. Opens no bridge.
"""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import shmbridge
from shmbridge.testing.fixtures import holders, segments_of

from .crew import Child, Crew
from .lane_words import Differences, PlantedLoss
from .ledger import ConsumerLog, Order, ProducerWords, producer_number
from .pattern import Pattern
from .producer_role import produce
from .reader import take_the_rest
from .word_referee import LAST, WordReferee

_PATIENCE_S = 40.0
_COUNT_PATIENCE_S = 3.0
_TICK_S = 0.004
_MOST_FAILED = 4


@dataclass
class Place:
    """One part that is played by one child after the other.

    `reader`: as of the referee; None: it reads nothing.
    """

    name: str
    start: Callable[["Place"], Callable[[], None]]
    reader: int | None = None
    number: int = 0  # of a producer: its slot
    delays_s: tuple[float, ...] = (0.0,)  # before a successor comes
    life: int = 0
    child: Child | None = None
    log: ConsumerLog | None = None
    words: memoryview | None = None
    due_s: float = 0.0
    kills: int = 0
    over: bool = False  # no successor follows
    # its log is final; whether the child had said that it would end so
    before_end: Callable[["Place"], bool] = lambda _: False
    longest_s: float = float("inf")  # a child that lives longer hangs
    began_s: float = 0.0
    may_fall: int = 0  # as of WordReferee.reader_ended


class Scene:
    """One run on one bridge of its own."""

    def __init__(
        self,
        crew: Crew,
        bridge: str,
        words: ProducerWords,
        incarnations: "itertools.count[int]",
        pattern: Pattern,
        referee: WordReferee,
    ) -> None:
        self.crew, self.bridge, self.pattern, self.referee = crew, bridge, pattern, referee
        self._words, self._incarnations = words, incarnations
        self.places: list[Place] = []
        self.ending = False  # a process that ends has no successor
        self.plant_lost = False  # two records are released uncounted, which must be found
        self._tasks: list[tuple[float, Callable[[], None]]] = []

    def add_producers(self, count: int, run: Callable[..., None] = produce) -> list[Place]:
        """Places for producers that put without end."""

        def start(place: Place) -> Callable[[], None]:
            number, incarnation = producer_number(place.number, place.life), next(self._incarnations)
            words = place.words = self._words.of(incarnation)
            self.referee.producer_begins(number, incarnation)
            return lambda: run(self.bridge, number, words, self.pattern, None)

        made = [Place(f"producer {slot}", start, number=slot, delays_s=(0.0, 0.02)) for slot in range(count)]
        self.places += made
        return made

    def add(
        self,
        name: str,
        role: Callable[[Place, ConsumerLog], Callable[[], None]],
        reader: int | None = None,
        *,
        delays_s=(0.0,),
    ) -> Place:
        """A place for children that write a log."""

        def start(place: Place) -> Callable[[], None]:
            log = place.log = ConsumerLog()
            return role(place, log)

        self.places.append(Place(name, start, reader, delays_s=delays_s))
        return self.places[-1]

    def begin(self, place: Place) -> None:
        """The next child of the place."""
        place.life += 1
        place.began_s = time.monotonic()
        place.child = self.crew.fork(place.start(place))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._tasks.append((time.monotonic() + delay_s, what))

    def pump(
        self,
        seconds: float,
        done: Callable[[], bool] = lambda: False,
        choose: Callable[[tuple[float, ...]], float] = min,
    ) -> bool:
        """Does what is due until then, or until `done`; returns whether it is done."""
        until_s = time.monotonic() + seconds
        while not done():
            now = time.monotonic()
            if now >= until_s:
                return False
            for task in [task for task in self._tasks if task[0] <= now]:
                self._tasks.remove(task)
                task[1]()
            for child in self.crew.reap():
                self._ended(child, choose)
            for place in self.places:
                if place.child is None and not (self.ending or place.over) and now >= place.due_s:
                    self.begin(place)
                elif place.child is not None and now > place.began_s + place.longest_s:
                    self._end_hanging(place)
            self.crew.wait(_TICK_S)
        return True

    def _end_hanging(self, place: Place) -> None:
        assert place.child is not None
        self.referee.fault(
            "failed", f"{place.name}, life {place.life}: it hangs; its stack is on standard error"
        )
        place.child.say_where()
        self.crew.wait(0.3)
        place.child.kill()
        place.began_s = float("inf")

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Waits until `done`; if it takes too long, a process is stuck: a violation."""
        if not self.pump(_PATIENCE_S, done):
            for place in self.places:
                if place.child is not None:
                    place.child.say_where()
            self.crew.wait(0.5)
            raise TimeoutError(
                f"not within {_PATIENCE_S:.0f} s: {what}; alive: "
                f"{[place.name for place in self.places if place.child]}"
            )

    def _ended(self, child: Child, choose: Callable[[tuple[float, ...]], float]) -> None:
        place = next(each for each in self.places if each.child is child)
        place.child = None
        who = f"{place.name}, life {place.life}"
        as_said = place.log is not None and place.before_end(place)
        if child.code == -9 and (child.killed or as_said):
            place.kills += 1
        elif child.code != 0:
            self.referee.fault(
                "failed", f"{who} (pid {child.pid}) ended with {child.code} and nobody had killed it"
            )
            if self.referee.counts["failed"] > _MOST_FAILED:
                raise RuntimeError(f"more than {_MOST_FAILED} children failed")
        if place.log is not None:
            if place.reader is not None:
                self.referee.reader_ended(place.reader, who, place.log.unread(), place.may_fall)
            place.log.close()
            place.log = None
        place.due_s = time.monotonic() + choose(place.delays_s)

    def end_producers(self, places: list[Place]) -> None:
        """They close; others go on meanwhile."""
        self.check_releases()
        for place in places:
            place.over = True
            if place.child is not None and place.words is not None:
                place.child.go_on()
                place.words[ProducerWords.ORDER] = Order.QUIT
        self.wait("all producers close", lambda: all(place.child is None for place in places))

    def check_releases(self) -> None:
        """Each lane's count of releases is what its slots show; a successor counts releases that a killed hub
        had not counted.
        """
        if self.plant_lost:
            self.wait("two releases are lost for good", PlantedLoss(self.bridge).stays)
        found = Differences(self.bridge)
        if not self.pump(_COUNT_PATIENCE_S, found.look):
            for name, apart in found.known.items():
                self.referee.fault(
                    "miscounted", f"{name}: its slots show {apart} more releases than were counted"
                )

    def end(self, may_miss: int = 0) -> None:
        """A last consumer takes what is left; then everything is judged, and nothing may be left."""
        self.ending = True
        self.wait("everybody ends", lambda: all(place.child is None for place in self.places))
        last = self.add(
            "the last consumer", lambda _, log: lambda: take_the_rest(self.bridge, log, self.pattern), LAST
        )
        self.begin(last)
        self.wait("the last consumer ends", lambda: last.child is None)
        self.referee.finish(may_miss)
        for left in [*segments_of(self.bridge), *holders(self.bridge)]:
            self.referee.fault("leaked", f"{left} is left after everybody has ended")

    def sweep(self) -> None:
        """Whatever happened, no process and no segment is left."""
        self.crew.kill_all()
        for place in self.places:
            if place.log is not None:
                place.log.close()
                place.log = None
        shmbridge.clean(self.bridge, dry_run=False)


def new_bridge(kind: str, seed: int, round_number: int) -> str:
    return f"{kind}-{os.getpid()}-{seed}-{round_number}"[:48]
