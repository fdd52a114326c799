"""Runs the play: starts producers and consumers, lets the schedule kill and stop them, and halts all of them
to count.

Knows the processes and the order of steps; the referee judges, and the schedule decides who is killed or
stopped. Opens no bridge.
"""

import heapq
import importlib
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shmbridge.testing.fixtures import holders, segments_of

from .consumer_role import consume
from .crew import Child, Crew
from .lane_words import PlantedLoss, unaccounted
from .ledger import ConsumerLog, Order, ProducerWords, State, producer_name, producer_number
from .pattern import Pattern
from .producer_role import produce, produce_one
from .referee import Referee
from .schedule import CONSUMER, Act, Event, Phase, Schedule, phases
from .tally import Tally

_IMPORTED_BEFORE_FORK = (
    "shmbridge.producer",
    "shmbridge.consumer",
    "shmbridge.control.server",
    "shmbridge.batch",
    "concurrent.futures.thread",
)
_LOOK_EVERY_S = 0.2
_PATIENCE_S = 30.0
_PROBES = 3
_NEVER_S = 5.0
_MORE_MAPS = 40  # arenas and stacks of threads come and go


@dataclass
class _Place:
    """A slot for one producer, or the consumer's place: its process, and that process' number in the line."""

    slot: int
    life: int = 0
    child: Child | None = None
    words: memoryview | None = None
    log: ConsumerLog | None = None
    groups: int = 0
    # the next successors are killed so long after their start
    soon_s: list[float] = field(default_factory=list)
    due: bool = False  # a successor is on its way


class Director:
    """One run on one bridge."""

    def __init__(
        self, bridge: str, seed: int, seconds: float, producers: int, *, plant: bool = False
    ) -> None:
        self._plant = plant  # two records are released uncounted, which must be found
        self._bridge, self._seconds, self._producers = bridge, seconds, producers
        self._pattern = Pattern(seed)
        self._schedule = Schedule(seed, seconds, producers)
        self._words = ProducerWords()
        self._referee = Referee(self._words)
        for name in _IMPORTED_BEFORE_FORK:
            importlib.import_module(name)
        self._crew = Crew()
        self._slots = [_Place(slot) for slot in range(producers + 1)]  # the last one is for probes
        self._consumer = _Place(CONSUMER)
        self._incarnations = itertools.count()
        self._tasks: list[tuple[float, int, Callable[[], None]]] = []  # successors to start
        # kills and stops; dropped when all halt
        self._harm: list[tuple[float, int, Callable[[], None]]] = []
        self._task_numbers = itertools.count()
        self._phase = Phase("calm", 0.0)
        self._held_back = False  # all processes are halted
        self._closing = False  # a process that ends has no successor
        self._looked = 0.0
        self._records_counted: list[int] = []  # by the referee, at each count of the present consumer
        # kind of phase -> records per second by slot, one entry per phase
        self._rates: dict[str, list[dict[int, float]]] = {}
        self.tally = Tally(seed, producers, counts=self._referee.counts)

    def run(self) -> Tally:
        """The whole play; the tally's violations are empty if all is well."""
        began = time.monotonic()
        try:
            self._start_all()
            self._count_all()
            for index, phase in enumerate(phases(self._seconds, self._producers)):
                left = began + self._seconds - time.monotonic()
                if left > 0:
                    self._play(index, phase, min(phase.seconds, left))
            self._end()
        finally:
            self._crew.kill_all()
        self.tally.seconds = time.monotonic() - began
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        self.tally.cpu_s = sum(each.ru_utime + each.ru_stime for each in used)
        return self.tally

    # -- time
    # --------------------------------------------------------------------------------------------------------

    def _after(self, delay_s: float, what: Callable[[], None], *, harm: bool = True) -> None:
        heapq.heappush(
            self._harm if harm else self._tasks, (time.monotonic() + delay_s, next(self._task_numbers), what)
        )

    def _pump(self, until_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Does what is due until then, or until `done`; returns whether it is done."""
        while not done():
            now = time.monotonic()
            if now >= until_s:
                return False
            for tasks in (self._harm, self._tasks):
                while tasks and tasks[0][0] <= now:
                    heapq.heappop(tasks)[2]()
            for child in self._crew.reap():
                self._ended(child)
            if now - self._looked > _LOOK_EVERY_S:
                self._looked = now
                self._referee.look()
            due = [tasks[0][0] for tasks in (self._harm, self._tasks) if tasks]
            next_s = min(until_s, now + (0.002 if self._held_back else _LOOK_EVERY_S), *due)
            self._crew.wait(next_s - time.monotonic())
        return True

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        if not self._pump(time.monotonic() + _PATIENCE_S, done):
            self._referee.look()
            raise TimeoutError(f"not within {_PATIENCE_S:.0f} s: {what}\n" + "\n".join(self._say_where()))

    def _say_where(self) -> Iterator[str]:
        """One line for each child; their stacks go to standard error."""
        for place in [*self._slots, self._consumer]:
            words = [] if place.words is None else place.words.tolist()[:4]
            yield (
                f"  {place.slot}.{place.life}: {place.child}, started, returned, state, order: {words}, "
                f"due: {place.due}"
            )
            if place.child is not None:
                place.child.say_where()
                self._crew.wait(0.2)

    # -- starting
    # --------------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        self._start_consumer()
        for place in self._slots[: self._producers]:
            self._start_producer(place)

    def _start_producer(self, place: _Place, *, probe: bool = False) -> None:
        place.due = False
        if place.child is not None:
            return
        place.life += 1
        number, incarnation = producer_number(place.slot, place.life), next(self._incarnations)
        words = place.words = self._words.of(incarnation)
        if self._held_back and not probe:
            words[ProducerWords.ORDER] = Order.HOLD
        most = self._schedule.successor(place.slot, place.life, self._phase).most
        self._referee.producer_begins(number, incarnation)
        if probe:
            place.child = self._crew.fork(lambda: produce_one(self._bridge, number, words, self._pattern))
        else:
            place.child = self._crew.fork(lambda: produce(self._bridge, number, words, self._pattern, most))
        self._kill_soon(place)

    def _start_consumer(self, *, single: bool = False) -> None:
        place = self._consumer
        place.due = False
        if place.child is not None:
            return
        place.life += 1
        log = place.log = ConsumerLog()
        life = place.life
        groups = place.groups = 0 if single else self._schedule.successor(CONSUMER, life, self._phase).groups
        self._referee.consumer_begins(life, log)
        self._records_counted = []
        place.child = self._crew.fork(lambda: consume(self._bridge, life, log, self._pattern, groups))
        self._kill_soon(place)

    def _kill_soon(self, place: _Place) -> None:
        if place.soon_s and place.child is not None:
            child = place.child
            self._after(place.soon_s.pop(0), child.kill)

    # -- ending
    # --------------------------------------------------------------------------------------------------------

    def _ended(self, child: Child) -> None:
        place = next(each for each in [*self._slots, self._consumer] if each.child is child)
        place.child = None
        is_consumer = place is self._consumer
        who = (
            f"consumer {place.life}"
            if is_consumer
            else producer_name(producer_number(place.slot, place.life))
        )
        if child.code == -9 and child.killed:
            self.tally.counts["consumer_kills" if is_consumer else "producer_kills"] += 1
        elif child.code != 0:
            self._referee.fault(
                "failed", f"failed: {who} (pid {child.pid}) ended with {child.code} and nobody had killed it"
            )
        if is_consumer:
            self._referee.consumer_ended()
            assert place.log is not None
            place.log.close()
            place.log = None
        if place.slot < self._producers and not self._closing and not (self._held_back and is_consumer):
            place.due = True
            delay_s = self._schedule.successor(place.slot, place.life + 1, self._phase).after_s
            self._after(
                delay_s,
                self._start_consumer if is_consumer else lambda: self._start_producer(place),
                harm=False,
            )

    # -- what the schedule wants
    # --------------------------------------------------------------------------------------------------------

    def _play(self, index: int, phase: Phase, seconds: float) -> None:
        """One phase, and a count after it."""
        self._phase = phase
        for event in self._schedule.events(index, phase):
            if event.at_s < seconds:
                self._after(event.at_s, lambda event=event: self._do(event))
        before, began = self._returned(), time.monotonic()
        self._pump(began + seconds)
        self._note_rates(phase, before, self._returned(), time.monotonic() - began)
        self._count_all()

    def _do(self, event: Event) -> None:
        if event.act is Act.KILL_ALL:
            for place in [self._consumer, *self._slots]:
                if place.child is not None:
                    place.child.kill()
            return
        place = self._consumer if event.slot == CONSUMER else self._slots[event.slot]
        if event.act is Act.KILL_RUNNING:
            place = self._running_from(event.slot)
        child = place.child
        if child is None:
            return
        place.soon_s = list(event.soon_s)
        if event.act in (Act.KILL, Act.KILL_RUNNING):
            child.kill()
        elif event.act is Act.CLOSE:
            assert place.words is not None
            place.words[ProducerWords.ORDER] = Order.QUIT
        else:
            child.stop()
            self.tally.counts["stops"] += 1
            self._after(event.for_s, child.go_on if event.act is Act.STOP else child.kill)

    def _running_from(self, slot: int) -> _Place:
        turn = [self._slots[(slot + offset) % self._producers] for offset in range(self._producers)]
        return next((place for place in turn if place.child is not None and place.child.running), turn[0])

    def _returned(self) -> dict[tuple[int, int], int]:
        return {
            (place.slot, place.life): place.words[ProducerWords.RETURNED]
            for place in self._slots
            if place.child is not None and place.words is not None
        }

    def _note_rates(
        self,
        phase: Phase,
        before: dict[tuple[int, int], int],
        after: dict[tuple[int, int], int],
        seconds: float,
    ) -> None:
        """Notes the rates of producers that live through all calm phases and phases with victims."""
        if phase.kind == "chaos":
            return
        done = self._rates.setdefault(phase.kind, [])
        done.append(
            {
                key[0]: (after[key] - before[key]) / seconds
                for key in before.keys() & after.keys()
                if key[0] % 2
            }
        )
        if phase.kind == "victims":
            calm, victims = (
                {slot: sum(rates.get(slot, 0.0) for rates in self._rates[kind]) for slot in done[0]}
                for kind in ("calm", "victims")
            )
            self.tally.ratios = [victims[slot] / calm[slot] for slot in calm if calm[slot]]

    # -- standing still
    # --------------------------------------------------------------------------------------------------------

    def _count_all(self) -> None:
        """Everybody halts; everything is delivered and released; what the consumer counts is compared with
        what was seen.
        """
        if self._plant:
            self._wait("two releases are lost for good", PlantedLoss(self._bridge).stays)
        self._held_back = True
        self._harm.clear()
        places = self._slots[: self._producers]
        for place in [*self._slots, self._consumer]:
            place.soon_s = []
            if place.child is not None:
                place.child.go_on()
            if place.child is not None and place.words is not None:
                place.words[ProducerWords.ORDER] = Order.HOLD
        self._have_single_consumer()
        self._wait(
            "all producers halt", lambda: all(not place.due and self._halted(place) for place in places)
        )
        self._have_single_consumer()
        self._order(Order.HOLD)
        self._referee.look()
        self._check_counts()
        for _ in range(_PROBES):
            self._probe()
        self.tally.quiet_points += 1
        self._held_back = False
        for place in places:
            if place.child is not None and place.words is not None:
                place.words[ProducerWords.ORDER] = Order.RUN
        self._order(Order.RUN, acknowledged=False)
        for place in places:
            self._start_producer(place)

    def _halted(self, place: _Place) -> bool:
        """Returns whether the place is empty, or its process puts nothing more; waits for one that is about
        to end.
        """
        if place.child is None:
            return True
        assert place.words is not None
        return place.words[ProducerWords.STATE] == State.HOLDING and not place.child.killed

    def _have_single_consumer(self) -> None:
        """Replaces a consumer of batches by one that obeys orders: batches cannot be waited for with a
        deadline.
        """
        place = self._consumer
        if place.child is not None and (place.groups or place.child.killed):
            place.child.kill()
            self._wait("the consumer ends", lambda: place.child is None)
        if place.child is None:
            self._start_consumer(single=True)

    def _order(self, order: Order, *, acknowledged: bool = True) -> None:
        place = self._consumer
        assert place.log is not None
        log, child = place.log, place.child
        serial = log.order(order)
        if acknowledged:
            self._wait(
                f"the consumer obeys {order.name}",
                lambda: place.child is not child or log.is_acknowledged(serial),
            )
            if place.child is not child:
                raise RuntimeError(f"the consumer ended on {order.name}")

    def _check_counts(self) -> None:
        stats = self._referee.stats
        now, first = stats[-1], stats[0]
        self._records_counted.append(self._referee.counts["records"])
        live = sum(place.child is not None for place in self._slots[: self._producers])
        fault = self._referee.fault
        if now["records_total"] != now["released_total"] or now["held"] or now["discarded_total"]:
            fault("miscounted", f"miscounted: nothing is held or discarded, the consumer counts {now}")
        for name, apart in unaccounted(self._bridge).items():
            fault(
                "miscounted", f"miscounted: the slots of {name} show {apart} more releases than were counted"
            )
        told, seen = (
            now["records_total"] - first["records_total"],
            self._records_counted[-1] - self._records_counted[0],
        )
        if told != seen:
            fault(
                "miscounted",
                f"miscounted: {told} records since the first count by the consumer's counters, {seen} were "
                "handed out",
            )
        if now["lanes_dead"] or now["lanes_live"] != live:
            fault(
                "leaked",
                f"leaked: {live} producers live, the consumer has {now['lanes_live']} live and "
                f"{now['lanes_dead']} dead lanes",
            )
        for what, per_lane, more in (("fds", 2, 2), ("segment_maps", 2, 0), ("maps", 2, _MORE_MAPS)):
            grown = now[what] - per_lane * now["lanes_live"] - (first[what] - per_lane * first["lanes_live"])
            if grown > more:
                message = (
                    f"leaked: {what} of the consumer grew by {grown} beyond its lanes over {len(stats)} "
                    "counts"
                )
                fault("leaked", f"{message}: {first} then {now}")

    def _probe(self) -> None:
        """Kills an idle producer, and times when that is seen, and when its memory is back after the last
        lease.
        """
        place, consumer = self._slots[-1], self._consumer
        self._start_producer(place, probe=True)
        child, log = place.child, consumer.log
        assert child is not None
        assert log is not None
        self._wait("the probe is idle", lambda: self._halted(place))
        lanes = self._lanes()
        log.words[log.STEP] = 0
        serial = log.order(Order.PROBE)
        self._wait("the consumer has the probe's record", lambda: log.words[log.STEP] == 1)
        killed_ns = time.monotonic_ns()
        child.kill()
        deadline = time.monotonic() + _NEVER_S
        while (left := self._lanes() >= lanes) and time.monotonic() < deadline:
            time.sleep(0.0003)
        gone_ns = time.monotonic_ns()
        self._wait("the consumer ends the probe", lambda: place.child is None and log.is_acknowledged(serial))
        self.tally.detection_ms.append((log.words[log.TIME_SEEN] - killed_ns) / 1e6)
        self.tally.memory_back_ms.append((gone_ns - log.words[log.TIME_RELEASED]) / 1e6)
        if left:
            self._referee.fault(
                "leaked",
                f"leaked: the lane of a dead producer is still there {_NEVER_S:.0f} s after its death",
            )
        if self.tally.detection_ms[-1] > 1e3 * _NEVER_S:
            self._referee.fault(
                "failed",
                f"failed: a producer was killed, and the consumer did not see it in {_NEVER_S:.0f} s",
            )

    def _lanes(self) -> int:
        return sum(".l." in name for name in segments_of(self._bridge))

    # -- the end
    # --------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Producers close, the last consumer takes the rest and closes; nothing may be left."""
        self._held_back = self._closing = True
        for place in self._slots[: self._producers]:
            if place.words is not None:
                place.words[ProducerWords.ORDER] = Order.QUIT
        self._wait("all producers close", lambda: all(place.child is None for place in self._slots))
        self._have_single_consumer()
        place = self._consumer
        assert place.log is not None
        place.log.order(Order.QUIT)
        self._wait("the last consumer closes", lambda: place.child is None)
        self._referee.finish()
        for left in [*segments_of(self._bridge), *holders(self._bridge), *_own_files()]:
            self._referee.fault("leaked", f"leaked: {left} is left after everybody has ended")


def _own_files() -> list[str]:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [
        f"this process has {os.readlink(link)}"
        for link in links
        if link.is_symlink() and "/shmbridge." in os.readlink(link)
    ]
