"""One lane as its consumer knows it: what can be taken, what it counts, whether it can still be believed.

Knows one lane's reader; which lanes there are is lanes.py's.
"""

import logging
from collections import Counter
from typing import Any

from shmbridge._ext import header, lane_reader
from shmbridge.record.record import Lane, Record
from shmbridge.segments.discard_reasons import Discard, Drop, labelled

log = logging.getLogger(__name__)

_LOOKS = 8


class HubLane:
    """One lane: its reader, what it says of all its records, and whether its producer is dead or its words
    cannot be true.
    """

    __slots__ = ("_last_counters", "dead", "lane", "name", "reader", "size")

    def __init__(self, reader: lane_reader.LaneReader, lane: Lane, size: int) -> None:
        self.name, self.reader, self.lane, self.size = lane.name, reader, lane, size
        self.dead = False
        self._last_counters: Counter[str] | None = None
        # an earlier hub did that: what was held then, or was committed since, is lost as well
        if reader.quarantined:
            self._give_up(reader.undelivered)

    @property
    def corrupt(self) -> bool:
        """Whether nothing is taken from it any more, because its words cannot be true."""
        return self.reader.untrusted

    @property
    def producer_id(self) -> str:
        """Whose lane it is."""
        return self.lane.producer_id

    @property
    def waiting(self) -> int:
        """Records that can be taken."""
        return 0 if self.corrupt else self.reader.waiting

    @property
    def held(self) -> int:
        """Records taken whose memory is not free yet: leased, or their release is put off for a rank of an
        earlier hub.
        """
        return self.reader.held + self.reader.put_off

    @property
    def dropped(self) -> int:
        """Records that were looked at and are un-released, though nobody holds a lease."""
        return self.reader.dropped

    @property
    def starves(self) -> bool:
        """Whether its producer asked for room in vain, and there is none yet."""
        wanted = self.reader.wanted_bytes
        if wanted == 0 or self.held + self.dropped == 0 or self.reader.has_room_for(wanted):
            return False
        # else the producer has moved on while its slots were looked at
        return self.reader.wanted_bytes == wanted

    def take(self) -> Record | None:
        """The next record; None if there is none, or if the lane has just been quarantined."""
        if self.corrupt:
            return None
        try:
            return self.reader.take(Record)
        except header.LaneCorrupt as wrong:
            self.distrust(str(wrong))  # a log that keeps it must not keep frames
            return None

    def distrust(self, why: str) -> None:
        """Quarantines the lane and says why, once."""
        if self._last_counters is None:
            self.quarantine()
            log.error("lane of producer %s is quarantined: %s", self.producer_id, why)

    def quarantine(self) -> None:
        """Takes nothing from the lane any more; what it held is counted, and its counters stand still."""
        waiting = self.reader.waiting  # this, or what follows, may be nonsense
        unreleased = self.reader.undelivered - self.held - self.dropped
        self._give_up(max(waiting if waiting <= self.reader.slot_count else 0, unreleased, 1))

    def _give_up(self, lost: int) -> None:
        """So many records are lost with the lane. Its words change no counter from here on."""
        self.reader.quarantine(lost)
        self._last_counters = self.counters()

    def _look(self) -> tuple[dict[str, Any], int]:
        """The lane's words, and how many records can be taken; of one moment, unless its producer commits
        between each two looks.
        """
        for _ in range(_LOOKS):
            words, waiting = header.lane_counters(self.reader.lane), self.waiting
            if header.lane_counters(self.reader.lane)["tail"] == words["tail"]:
                break
        return words, waiting

    def counters(self) -> Counter[str]:
        """From the lane's own words."""
        if self._last_counters is not None:
            last, held = self._last_counters, self.reader.held + self.dropped
            released = last["released_total"] + last["held"] - held
            return Counter({**last, "held": held, "put_off": self.reader.put_off, "released_total": released})
        words, waiting = self._look()
        discarded = [
            done + later for done, later in zip(words["discarded"], self.reader.discards_put_off, strict=True)
        ]
        released = words["released"] + self.reader.put_off - sum(discarded)
        discarded[Discard.CORRUPT] += words["quarantined"]  # those are never released
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
                "lane_bytes": self.size,
                **labelled("dropped_total", Drop, words["dropped"]),
                **labelled("discarded_total", Discard, discarded),
            }
        )
