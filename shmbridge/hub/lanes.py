"""The lanes that a consumer has adopted: finds and checks them, takes records in turn, removes dead lanes.

A tap sees each record first.

`take` is for the consumer's thread, removal for the death watch's, everything else for any thread.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shmbridge._ext import header
from shmbridge._ext import lane as lane_reader
from shmbridge._ext.header import Mapping
from shmbridge._ext.lane import LanePoller
from shmbridge.errors import (
    BadArgument,
    Closed,
    Discard,
    Drop,
    Lost,
    ProcessLimit,
    SchemaMismatch,
    ShmPermission,
    counted,
    labelled,
)
from shmbridge.record import Call, Lane, Record, abandon, say_lost
from shmbridge.schema import Columns
from shmbridge.segments import (
    Closing,
    DeathWatch,
    LockByte,
    as_process_limit,
    check_descriptors,
    check_threads,
    lane_names,
    lock_exclusive,
    open_mapping,
    raise_descriptors,
    ranks_before,
    remove_lane,
    tickets_held,
    unlock,
)
from shmbridge.watch.long_wait import LongWait

if TYPE_CHECKING:
    _Poller = LanePoller[Record]
else:
    _Poller = LanePoller


class Tap(Protocol):
    """What `Consumer(tap=)` takes. Its calls come from the thread that takes records, one at a time."""

    def take(self, records: Sequence[Record]) -> None:
        """Gets records in the order in which they are handed out next. May block: the consumer waits.

        An exception ends the call that was to hand them out. They stay un-released and come to the tap again,
        before all others, so a tap may get a record twice. Keep no view of a record: copy.
        """

    def close(self) -> None:
        """Ends the tap, at the end of its consumer. Idempotent."""


def check_tap(tap: Tap | None) -> Tap | None:
    """Returns it, or raises BadArgument for what has no `take` and `close`."""
    if tap is None or all(callable(getattr(tap, name, None)) for name in ("take", "close")):
        return tap
    raise BadArgument(
        f"tap={tap!r} has no take() and close()", hint="tap=shmbridge.archive.recorder.Recorder(folder)"
    )


class TappedPoller(_Poller):
    """The lanes of a hub in turn, through a tap: what the tap has not taken is handed out to nobody."""

    tap: Tap

    def begin(self, tap: Tap, note_wait: Callable[[int], None]) -> None:
        """Sets the tap, once, before anything is taken; `note_wait` is told the nanoseconds of each call."""
        self.tap, self._note_wait = tap, note_wait
        self._untapped: list[Record] = []
        self._wait_s, self._since_s = 0.0, 0.0

    def take(self, anyway: bool = False, by: int = 0) -> Record | None:
        """Returns the next record, as LanePoller.take, once the tap has it."""
        if not self._untapped:
            record = super().take(anyway, by)
            if record is None:
                return None
            self._untapped = [record]
        return self._through_tap(1, by)[0]

    def poll(self, most: int, anyway: bool = False, by: int = 1) -> list[Record]:
        """Returns up to `most` records, as LanePoller.poll, once the tap has them."""
        if len(self._untapped) < most:
            self._untapped += super().poll(most - len(self._untapped), anyway, by)
        return self._through_tap(most, by) if self._untapped and most > 0 else []

    def _through_tap(self, most: int, by: int) -> list[Record]:
        records = self._untapped[:most]
        self._since_s = time.monotonic()
        try:
            self.tap.take(records)
        finally:
            took_s = time.monotonic() - self._since_s
            self._wait_s, self._since_s = self._wait_s + took_s, 0.0
            self._note_wait(int(took_s * 1e9))
            for record in records:  # a tap's look is not the user's
                record._looked_at, record._handed_out_by = False, by
        del self._untapped[:most]
        return records

    def stats(self) -> dict[str, float]:
        """Returns `tap_wait_s`, seconds spent in the tap, and `tap_busy`, 1 during a call. Any thread."""
        since_s = self._since_s
        running_s = time.monotonic() - since_s if since_s else 0.0
        return {"tap_wait_s": self._wait_s + running_s, "tap_busy": float(since_s > 0)}

    def close(self) -> None:
        """Lets go of everything; records that the tap has not taken go to the next hub."""
        abandon(self._untapped)
        self._untapped = []
        super().close()


log = logging.getLogger(__name__)

_LOOKS = 8
_KILLED_S = 0.2  # the kernel frees a dead hub's locks one by one, that of the bridge first
_DESCRIPTORS = 32  # control plane, death watch, and short-lived ones
_THREADS = 5  # death watch, control plane and its socket library's two, prefetch


class HubLane:
    """One adopted lane: its reader, what its records share, whether its producer is dead, its quarantine."""

    __slots__ = ("_last_counters", "dead", "lane", "name", "reader", "size")

    def __init__(self, reader: lane_reader.LaneReader, lane: Lane, size: int) -> None:
        self.name, self.reader, self.lane, self.size = lane.name, reader, lane, size
        self.dead = False
        self._last_counters: Counter[str] | None = None
        # Quarantined by an earlier hub: records held then, or committed since, are lost as well.
        if reader.quarantined:
            self._give_up(reader.undelivered)

    @property
    def corrupt(self) -> bool:
        """Whether the lane is quarantined: its words cannot be true, and no record is taken from it."""
        return self.reader.untrusted

    @property
    def producer_id(self) -> str:
        """Id of the lane's producer."""
        return self.lane.producer_id

    @property
    def waiting(self) -> int:
        """Records that can be taken."""
        return 0 if self.corrupt else self.reader.waiting

    @property
    def finished(self) -> bool:
        """Whether its producer is dead, all its records are taken, and no other lane will bring more."""
        return self.dead and not self.waiting and not header.origin_open(self.reader.lane)

    @property
    def held(self) -> int:
        """Records that are leased, or whose release is deferred for a rank of an earlier hub."""
        return self.reader.held + self.reader.put_off

    @property
    def dropped(self) -> int:
        """Un-released records that were read and are no longer leased."""
        return self.reader.dropped

    @property
    def waits_for_space(self) -> bool:
        """Whether its producer waits for room, and there is none yet."""
        wanted = self.reader.wanted_bytes
        if wanted == 0 or self.held + self.dropped == 0 or self.reader.has_room_for(wanted):
            return False
        # If it changed, the producer has moved on while its slots were read.
        return self.reader.wanted_bytes == wanted

    def take(self) -> Record | None:
        """Returns the next record; None if there is none, or if the lane has just been quarantined."""
        if self.corrupt:
            return None
        try:
            return self.reader.take(Record)
        except header.LaneCorrupt as wrong:
            self.quarantine(str(wrong))  # as text: a logger that keeps the exception would keep frames
            return None

    def quarantine(self, why: str) -> None:
        """Takes nothing from the lane any more; counts its lost records and says why, once."""
        if self._last_counters is None:
            waiting = self.reader.waiting  # this value and the next may be garbage
            unreleased = self.reader.undelivered - self.held - self.dropped
            self._give_up(max(waiting if waiting <= self.reader.slot_count else 0, unreleased, 1))
            log.error("lane of producer %s is quarantined: %s", self.producer_id, why)

    def _give_up(self, lost: int) -> None:
        """Counts `lost` records as lost with the lane. From here on its words change no counter."""
        self.reader.quarantine(lost)
        self._last_counters = self.counters()

    def _look(self) -> tuple[dict[str, Any], int]:
        """Returns the lane's words and its number of records to take; consistent unless it never rests."""
        for _ in range(_LOOKS):
            words, waiting = header.lane_counters(self.reader.lane), self.waiting
            if header.lane_counters(self.reader.lane)["tail"] == words["tail"]:
                break
        return words, waiting

    def counters(self) -> Counter[str]:
        """Returns the counters, from the lane's own words."""
        if self._last_counters is not None:
            last, held = self._last_counters, self.reader.held + self.dropped
            released = last["released_total"] + last["held"] - held
            return Counter({**last, "held": held, "put_off": self.reader.put_off, "released_total": released})
        words, waiting = self._look()
        discarded = [
            done + later for done, later in zip(words["discarded"], self.reader.discards_put_off, strict=True)
        ]
        released = words["released"] + self.reader.put_off - sum(discarded)
        discarded[Discard.CORRUPT] += words["quarantined"]  # never released
        return Counter(
            {
                "records_total": words["tail"],
                "released_total": released,
                "held": waiting + self.reader.held + self.dropped,
                "put_off": self.reader.put_off,
                "tokens_total": words["tokens"],
                "bytes_total": words["bytes"],
                "producer_wait_ns": words["wait_ns"],
                "late_wakes_total": words["late_wakes"],
                "logprobs_unrecorded_total": words["logprobs_unrecorded"],
                "lane_bytes": self.size,
                **labelled("dropped_total", Drop, words["dropped"]),
                **labelled("discarded_total", Discard, discarded),
                **labelled("episodes_lost_total", Lost, words["episodes_lost"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Stuck:
    """Lanes filled by leased or dropped records, so that nothing more can come; `live` producers live."""

    lanes: int
    live: int
    data_bytes: int
    held: int
    dropped: int
    wanted_bytes: int
    crowded: bool


class LaneSet:
    """All adopted lanes of a bridge."""

    def __init__(
        self,
        bridge: str,
        control: header.Control,
        columns: Columns,
        limit: int,
        closing: Closing,
        tap: Tap | None = None,
    ) -> None:
        raise_descriptors()
        check_descriptors(_DESCRIPTORS, f"the consumer of bridge {bridge!r} with up to {limit} lanes")
        check_threads(_THREADS, f"the consumer of bridge {bridge!r}")
        self.bridge, self.columns, self.limit = bridge, columns, limit
        self._control = control
        self._lanes: dict[str, HubLane] = {}
        # Just opened: with the producer's pid and pid namespace.
        self._unsettled: dict[str, tuple[HubLane, int, int]] = {}
        on_lost = functools.partial(say_lost, f"bridge {bridge!r}")
        poller = LanePoller if tap is None else TappedPoller
        self.turns = poller(Record, control.mapping, self._on_corrupt, control.arrivals, on_lost)
        self.tapped = self.turns if isinstance(self.turns, TappedPoller) else None
        if tap is not None and self.tapped is not None:
            self.tapped.begin(tap, control.note_tap_wait)
        # Those of one origin behind an earlier one with records to take: a relay and its consumer have died.
        self._behind: list[HubLane] = []
        self.refused: dict[str, str] = {}  # and why
        self._taken: set[str] = set()  # the refused lanes that another consumer reads; tried again
        self._gone: Counter[str] = Counter()  # counters of removed lanes
        self._counting = closing.lock()  # moves a lane's counters from _lanes to _gone
        self._crowded = False  # there are more lanes than `limit`
        self._blocked = False  # a limit of this process kept a lane from being opened
        self._ranks_before = False
        self._adopting, self._long_wait = closing.lock(), LongWait(bridge)
        self._watch = DeathWatch(self._on_death, self._tick)

    def __iter__(self) -> Iterator[HubLane]:
        """Iterates over a snapshot: the death watch may remove lanes."""
        return iter(list(self._lanes.values()))

    def __len__(self) -> int:
        return len(self._lanes)

    # -- adopting

    def adopt(self, *, strict: bool = False) -> None:
        """Adopts every new lane there is room for, oldest first; dead lanes without records need none.

        A lane that disagrees on a column's type is refused and logged; with `strict` it is a SchemaMismatch.
        If this process has no descriptor or address space left for a lane, the death watch tries again.
        """
        with self._adopting:
            if self.turns.closed:
                raise Closed(
                    f"the consumer of bridge {self.bridge!r} is closed", hint=f"Consumer({self.bridge!r})"
                )
            # Read before the names are listed: a later arrival is looked for again.
            arrivals = self._control.arrivals
            # Deliberately stale until all are adopted, so that take() calls adopt() and blocks on _adopting.
            self.turns.arrivals = (arrivals - 1) & 0xFFFFFFFF
            self._settle()
            self._adopt(strict)
            self.turns.arrivals = arrivals

    def _adopt(self, strict: bool) -> None:
        room, crowded, blocked = self._room(), 0, ""
        found: list[tuple[int, str, Mapping, dict[str, Any]]] = []
        try:
            names = lane_names(self.bridge)
            self._taken.intersection_update(names)
            for name in names:
                if (
                    name not in self._lanes
                    and name not in self.refused.keys() - self._taken
                    and (opened := self._open(name)) is not None
                ):
                    found.append((opened[1]["created_ns"], name, *opened))
                    found.sort(key=lambda each: each[:2])
                    crowded += len(found) > room
                    del found[room:]  # keep the oldest; limits how many are open at a time
        except OSError as wrong:
            limit = (
                wrong
                if isinstance(wrong, ProcessLimit)
                else as_process_limit(wrong, f"a lane of bridge {self.bridge!r}")
            )
            if limit is None:
                raise
            blocked = str(limit)
        for _, name, mapping, info in found:
            self._adopt_one(name, mapping, info, strict)
        del found
        self._say_what_waits(crowded, blocked)

    def _room(self) -> int:
        """Returns how many more lanes may be adopted."""
        return max(self.limit - sum(not lane.dead or lane.waiting > 0 for lane in self), 0)

    def _open(self, name: str) -> tuple[Mapping, dict[str, Any]] | None:
        """Returns a ready lane's mapping and header; None if it is gone, not ready, or refused.

        Raises ProcessLimit.
        """
        try:
            mapping = open_mapping(name, minimum=header.control_bytes)
            info = None if mapping is None else header.read_lane(mapping)
        except (ShmPermission, header.LaneCorrupt) as wrong:
            self._refuse(name, str(wrong))
            return None
        return None if mapping is None or info is None else (mapping, info)

    def _lock(self, name: str, mapping: Mapping) -> bool:
        """Takes the lane's reader lock; returns False if another consumer holds it.

        The other consumer belongs to a removed control segment, unless it is just dying.
        """
        until = time.monotonic() + (0 if name in self._taken else _KILLED_S)
        while not lock_exclusive(mapping.fd, LockByte.READER):
            if time.monotonic() >= until:
                if name not in self._taken:
                    self._taken.add(name)
                    self._refuse(
                        name,
                        "another consumer reads it, whose control segment was removed; adopted once that "
                        "one has ended",
                    )
                return False
            time.sleep(0.002)
        self._taken.discard(name)
        self.refused.pop(name, None)
        return True

    def _adopt_one(self, name: str, mapping: Mapping, info: dict[str, Any], strict: bool) -> None:
        if not self._lock(name, mapping):
            return
        try:
            columns = Columns.decode(info["columns"])
            columns.check_standard()
        except SchemaMismatch as garbage:  # no producer writes this: refuse this lane alone
            self._refuse(name, str(garbage))
            return
        try:
            here = f"in producer {info['producer_id']}"
            self.columns.check_agrees(columns, "in this consumer", here)
            for other in self:
                columns.check_agrees(other.lane.columns, here, f"in producer {other.producer_id}")
            reader = lane_reader.LaneReader(mapping, self._control.mapping)
            lane = Lane.of(info, columns, name)
            lane.describe_to(reader, info["columns"])
        except (SchemaMismatch, header.LaneCorrupt) as wrong:
            if strict and isinstance(wrong, SchemaMismatch):
                raise
            self._refuse(name, str(wrong))
            return
        mapping.protect(reader.data_at)
        reader.ranks_before = self._ranks_before
        self._unsettled[name] = (HubLane(reader, lane, mapping.size), info["pid"], info["pid_namespace"])
        self._settle()

    def _settle(self) -> None:
        """Takes from just opened lanes from now on, and watches their producers. Idempotent."""
        for name, (adopted, pid, namespace) in list(self._unsettled.items()):
            self._lanes[name] = adopted
            if not adopted.corrupt:
                self.turns.remove(adopted.reader)
                if adopted not in self._behind:
                    self._behind.append(adopted)
                self._let_follow()
            adopted.reader.ring()  # a predecessor may have died between release and wake
            self._watch.watch(name, adopted.reader.lane, pid, namespace)
            del self._unsettled[name]

    def _let_follow(self) -> None:
        """Takes in turn also from lanes behind an earlier one of their origin, once that has nothing to take.

        For the holder of `_adopting`. Idempotent.
        """
        lanes = list(self)
        for lane in list(self._behind):
            earlier = lanes[: lanes.index(lane)]
            if not any(each.lane.source == lane.lane.source and each.waiting for each in earlier):
                self.turns.remove(lane.reader)
                self.turns.add(lane.reader)
                self._behind.remove(lane)

    def _refuse(self, name: str, why: str) -> None:
        self.refused[name] = why
        log.error("lane %s is refused: %s", name, why)

    def _say_what_waits(self, crowded: int, blocked: str) -> None:
        if crowded and not self._crowded:
            log.warning(
                "%d environments of bridge %r wait for a lane: the consumer takes from %d at once -> raise "
                "--lanes (of the learner), lanes: (of launch), or Consumer(lanes=); shmbridge inspect %s "
                "shows which",
                crowded,
                self.bridge,
                self.limit,
                self.bridge,
            )
        if blocked and not self._blocked:
            log.error(
                "bridge %r has %d lanes, and at least one more that waits: %s",
                self.bridge,
                len(self._lanes),
                blocked,
            )
        self._crowded, self._blocked = crowded > 0, bool(blocked)

    @property
    def _has_new_lanes(self) -> bool:
        """Whether lanes have arrived that are not adopted yet."""
        return self.turns.has_new_lanes

    @property
    def some_wait(self) -> bool:
        """Whether a lane is known that could not be adopted yet."""
        return self._crowded or self._blocked

    def refused_lanes(self) -> dict[str, str]:
        """Returns the lanes that this consumer will not adopt, and why; any thread."""
        return {name: why for name, why in list(self.refused.items()) if name not in self._taken}

    # -- taking

    def take(self, call: Call) -> Record | None:
        """Returns the next record, taking lanes in turn; None if no lane has one."""
        records = self.poll(1, call)
        return records[0] if records else None

    def poll(self, most: int, call: Call = Call.POLL) -> list[Record]:
        """Returns up to `most` records that are there now, taking lanes in turn."""
        if self._has_new_lanes:
            self.adopt()
        records = self.turns.poll(most, True, call)
        if not records and most > 0 and self._behind:
            with self._adopting:
                self._let_follow()
            records = self.turns.poll(most, True, call)
        if not records and most > 0 and self._crowded and self._room():
            self.adopt()
            records = self.turns.poll(most, True, call)
        return records

    def take_back_dropped(self) -> int:
        """Queues records that were read and dropped for redelivery, before all others; returns how many."""
        return sum(lane.reader.take_back_dropped() for lane in self if not lane.corrupt)

    def _on_corrupt(self, reader: lane_reader.LaneReader, why: str) -> None:
        for lane in self:
            if lane.reader is reader:
                lane.quarantine(why)

    def take_backlog(self) -> Iterator[Record]:
        """Yields the records that were committed and un-released when these lanes were adopted."""
        for lane in self:
            for _ in range(lane.waiting):
                if (record := lane.take()) is None:
                    break  # the lane's words claimed more records than there are
                yield record

    def ring_all(self) -> None:
        """Wakes every producer that waits for room or for the end of a pause."""
        for lane in self:
            lane.reader.ring()

    # -- deaths

    def _on_death(self, name: str) -> None:
        """The producer's lock is free: nothing more will be committed."""
        lane = self._lanes.get(name)
        if lane is not None:
            lane.dead = True
            self._control.ring()

    def _tick(self) -> bool:
        """Adopts lanes that arrived while the consumer was busy, removes dead lanes that hold nothing; logs
        what a long wait is for.

        Returns whether to look again soon: a dead lane or a rank of an earlier hub is left, or a line is due.
        """
        if self._has_new_lanes or self._blocked or self._taken or (self._crowded and self._room()):
            known = len(self._lanes)
            self.adopt()
            if len(self._lanes) != known:
                # The consumer may sleep, and nothing else wakes it for the new lanes.
                self._control.ring()
        if self._ranks_before:
            self._apply_ranks_before()
        if self._behind:
            with self._adopting:
                self._let_follow()
            self._control.ring()
        left = self._ranks_before or bool(self._behind)
        for lane in self:
            if lane.dead:
                left |= bool(lane.waiting or lane.held or lane.dropped or not self._remove_dead(lane))
        asking_ns = self._control.asking_ns
        return self._long_wait.look(asking_ns / 1e9 if asking_ns else None) or left

    def look_for_ranks(self) -> None:
        """Defers releases while a rank of an earlier hub lives; called once this hub's epoch has begun."""
        self._apply_ranks_before()
        self._watch.nudge()

    def _apply_ranks_before(self) -> None:
        """Defers releases of redelivered records while a rank of an earlier hub lives; does them after."""
        with self._adopting:
            self._ranks_before = ranks_before(self._control)
            for lane in self:
                if self._ranks_before:
                    lane.reader.ranks_before = True
                else:
                    lane.reader.release_put_off()

    def _remove_dead(self, lane: HubLane) -> bool:
        if lane in self._behind:
            return False
        counters = lane.counters()
        try:
            removed, reason, _ = remove_lane(lane.name, with_records=lane.corrupt)
        except ProcessLimit:  # retry when a descriptor is free
            return False
        if not (removed or reason == "gone already"):
            return False
        self.turns.remove(lane.reader)
        with self._counting:
            self._lanes.pop(lane.name, None)
            self._gone.update(
                {
                    key: value
                    for key, value in counters.items()
                    if key not in ("held", "put_off", "lane_bytes")
                }
            )
        if self._crowded:
            self._control.ring()  # a waiting lane may have room now
        return True

    def finished_producers(self) -> set[str]:
        """Returns the ids of producers that will put nothing more and whose records are all taken.

        Of a producer on another node this node's relay must have said so: a relay's death says nothing.
        """
        return {lane.lane.source for lane in self if lane.finished} - {
            lane.lane.source for lane in self if not lane.dead
        }

    def live_producers(self) -> set[str]:
        """Returns the ids of living producers with an adopted lane."""
        return {lane.producer_id for lane in self if not lane.dead}

    def busy_producers(self) -> set[str]:
        """Returns the ids of producers with records that are not taken yet."""
        return {lane.lane.source for lane in self if lane.waiting}

    @property
    def nothing_left(self) -> bool:
        """Whether nothing can be taken, and no lane waits to be adopted."""
        return not (self._has_new_lanes or self.some_wait) and not any(lane.waiting for lane in self)

    def tickets(self) -> dict[str, int]:
        """Returns per living lane the groups begun and not put; one system call per lane. Any thread."""
        return {
            lane.name: tickets_held(lane.reader.lane.fd) for lane in self if not (lane.corrupt or lane.dead)
        }

    # -- state

    @property
    def live(self) -> int:
        """Lanes whose producer lives."""
        return sum(not lane.dead for lane in self)

    @property
    def held(self) -> int:
        """Records taken and not yet released, over all lanes; without dropped ones."""
        return sum(lane.held for lane in self)

    def dropped_words(self) -> str:
        """Returns an error message's words about dropped records that occupy room; "" for none."""
        if not (dropped := sum(lane.dropped for lane in self)):
            return ""
        were, keep = ("was", "keeps its") if dropped == 1 else ("were", "keep their")
        records = counted(dropped, "record")
        return f"; {records} {were} dropped without release and {keep} room: take_back_dropped()"

    def producers_words(self) -> str:
        """Returns an error message's words about how many lanes have a living producer."""
        live = self.live
        return f"{live} of {counted(len(self), 'lane')} {'has' if live == 1 else 'have'} a living producer"

    def stuck(self, held_here: int) -> Stuck | None:
        """Returns the full lanes if only a release of the caller's `held_here` makes room; else None."""
        held = self.held  # read first: a later release shows as room in the lanes
        lanes = [lane for lane in self if not lane.corrupt]
        if all(lane.dead for lane in lanes):
            return None
        if any(lane.waiting or not (lane.dead or lane.waits_for_space) for lane in lanes):
            return None
        if held > held_here:  # leases held elsewhere will end and make room
            return None
        return Stuck(
            lanes=len(lanes),
            live=sum(not lane.dead for lane in lanes),
            data_bytes=sum(lane.reader.data_bytes for lane in lanes),
            held=held,
            dropped=sum(lane.dropped for lane in lanes),
            wanted_bytes=max(lane.reader.wanted_bytes for lane in lanes),
            crowded=self.some_wait,
        )

    def counters(self) -> Counter[str]:
        """Returns the counters summed over all lanes, present and removed."""
        with self._counting:
            total, lanes = Counter(self._gone), list(self)
        for lane in lanes:
            total.update(lane.counters())
        total["leases_returned_total"], total["leases_dropped_total"] = (
            self.turns.drops.returned,
            self.turns.drops.dropped,
        )
        return total

    def abandon(self) -> None:
        """Ends leases without release from now on: the next consumer gets those records again."""
        for lane in self:
            lane.reader.abandoned = True

    def unlock(self) -> None:
        """Gives every lane to the next consumer, also while views live: they can release nothing any more."""
        for lane in self:
            if not lane.reader.lane.forked:
                unlock(lane.reader.lane.fd, LockByte.READER)

    def close(self) -> int:
        """Ends the death watch and drops all lanes but those of views; returns how many records are leased.

        A deferred release is no longer done: the next consumer gets the record again.
        """
        self._watch.stop()
        with self._adopting:
            self._behind.clear()
            self.turns.close()  # from here on nothing is taken, by any iteration
            held = sum(lane.reader.held for lane in self)
            for lane in self:
                if not lane.reader.held and not lane.reader.lane.forked:
                    # No remaining holder of the lane reads in it.
                    unlock(lane.reader.lane.fd, LockByte.READER)
            self._lanes.clear()
            self._unsettled.clear()
            vars(self).pop("_control", None)  # only views, through their reader, keep it from here on
        return held
