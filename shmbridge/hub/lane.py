"""One lane on the consumer's side: its records to take, its counters, and its quarantine."""

import logging
from collections import Counter
from typing import Any

from shmbridge._ext import header
from shmbridge._ext import lane as lane_reader
from shmbridge.record.record import Lane, Record
from shmbridge.segments.discard_reasons import Discard, Drop, Lost, labelled

log = logging.getLogger(__name__)

_LOOKS = 8


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
