"""The children's logs, in memory that outlives them: shared anonymous maps, made before
the fork.

A producer has eight words; a consumer has a head of words and a log of 16-byte entries. A process that is
killed leaves exactly what it had stored. Knows nothing of bridges; the referee knows who died and what the
entries prove.
"""

import mmap
from enum import IntEnum

import numpy as np

_MOST_PRODUCERS = 1 << 15
_WORDS = 8
_HEAD_WORDS = 64
_LOG_BYTES = 512 << 20  # of which only what is written exists
_FORGET_BYTES = 4 << 20
_PAGE = 4096


class Order(IntEnum):
    """An order of the director to a child."""

    RUN = 0
    HOLD = 1  # producer: put nothing; consumer: drain, release, count
    PROBE = 2  # consumer: take one record and watch its producer die
    QUIT = 3


class State(IntEnum):
    """A producer's state, as it reports it."""

    STARTING = 0
    RUNNING = 1
    HOLDING = 2
    CLOSED = 3


class ProducerWords:
    """started: records handed over to put, stored before the call; returned: known to be committed, stored
    after it.
    """

    STARTED, RETURNED, STATE, ORDER = range(4)

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _MOST_PRODUCERS * _WORDS * 8)
        self._words = memoryview(self._map).cast("Q")

    def of(self, incarnation: int) -> memoryview:
        """The words of one incarnation, counted over the whole run."""
        if incarnation >= _MOST_PRODUCERS:
            raise RuntimeError(f"more than {_MOST_PRODUCERS} producers in one run")
        return self._words[incarnation * _WORDS : (incarnation + 1) * _WORDS]


class Kind(IntEnum):
    """The kind of a log entry. A number is a producer's, a value is a sequence unless said otherwise."""

    ASKED = 1  # value: so many records may be taken before the next entry of this kind
    ASKED_BATCHES = 2  # likewise, and for good: some are always on their way
    GOT = 3  # handed out unmarked
    GOT_AGAIN = 4  # handed out with redelivered=True
    RELEASING = 5  # over when any entry follows
    RELEASING_MANY = 6  # a run of these is over when an entry of another kind follows
    TORN = 7
    NOTE = 8  # only ends the entry before
    STAT = 9  # number: which; value: its value


STATS = (
    "records_total",
    "released_total",
    "held",
    "discarded_total",
    "lanes_live",
    "lanes_dead",
    "fds",
    "segment_maps",
    "maps",
)


class ConsumerLog:
    """One consumer incarnation's. `append` is for the child, the rest for the director."""

    COUNT, ORDER, ACKNOWLEDGED, STEP, TIME_SEEN, TIME_RELEASED, READY = range(7)

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _LOG_BYTES)
        self.words = memoryview(self._map).cast("Q")
        self._at = _HEAD_WORDS
        self._read = _HEAD_WORDS
        self._forgotten = _HEAD_WORDS * 8

    def append(self, kind: int, number: int, value: int) -> None:
        words, at = self.words, self._at
        words[at] = kind << 56 | number
        words[at + 1] = value
        self._at = words[0] = at + 2

    @property
    def full(self) -> bool:
        return self._at > len(self.words) - (1 << 20)

    def order(self, order: Order) -> int:
        """Gives an order; its serial number is acknowledged by `acknowledge`."""
        serial = (self.words[self.ORDER] >> 8) + 1
        self.words[self.ORDER] = serial << 8 | order
        return serial

    def acknowledge(self) -> None:
        self.words[self.ACKNOWLEDGED] = self.words[self.ORDER] >> 8

    def is_acknowledged(self, serial: int) -> bool:
        return self.words[self.ACKNOWLEDGED] >= serial

    def unread(self) -> "np.ndarray":
        """Entries written since the last call, as (n, 2) words: kind and number, value."""
        end = self.words[0] or _HEAD_WORDS
        entries = self._entries(self._read, end).copy()
        self._read = end
        return entries

    def last(self, count: int) -> "np.ndarray":
        """The last entries that were written."""
        end = self.words[0] or _HEAD_WORDS
        return self._entries(max(end - 2 * count, _HEAD_WORDS, self._forgotten // 8), end).copy()

    def forget(self) -> None:
        """Gives memory of entries back that were read long ago."""
        until = (self._read * 8 - _FORGET_BYTES) // _PAGE * _PAGE
        start = -(-self._forgotten // _PAGE) * _PAGE
        if until - start >= _FORGET_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, start, until - start)
            self._forgotten = until

    def close(self) -> None:
        self.words.release()
        self._map.close()

    def _entries(self, start: int, end: int) -> "np.ndarray":
        return np.frombuffer(self.words, np.uint64, end - start, start * 8).reshape(-1, 2)


def kinds_of(entries: "np.ndarray") -> "np.ndarray":
    return (entries[:, 0] >> np.uint64(56)).astype(np.int64)


def numbers_of(entries: "np.ndarray") -> "np.ndarray":
    return (entries[:, 0] & np.uint64((1 << 56) - 1)).astype(np.int64)


def describe(entries: "np.ndarray") -> list[str]:
    """One line for each entry."""
    rows = zip(kinds_of(entries), numbers_of(entries), entries[:, 1].tolist(), strict=True)
    return [f"{Kind(kind).name} {producer_name(number)} {value}" for kind, number, value in rows]


def producer_number(slot: int, life: int) -> int:
    return slot << 24 | life


def producer_name(number: int) -> str:
    """The producer_id of a number."""
    return f"p{number >> 24}.{number & 0xFFFFFF}"


def number_of(producer_id: str) -> int:
    """The number of a producer_id, as it was given or as records carry it."""
    slot, _, life = producer_id[1:].partition("-")[0].partition(".")
    return producer_number(int(slot), int(life))
