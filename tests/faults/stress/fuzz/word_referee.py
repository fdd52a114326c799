"""Judges readers by their logs: a released record must have been given back by a reader that had seen it.

Knows entries and numbers only. It takes the final logs of readers in any order, and asks at the end whether
each record that its producer was told of was given back by some reader. It needs no order between readers, so
they may run side by side.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .ledger import Kind, ProducerWords, kinds_of, numbers_of, producer_name

VIOLATIONS = ("lost", "unmarked", "out_of_order", "torn", "phantom", "miscounted", "leaked", "failed")
LAST = 7  # the reader that takes the records that all others left
_MOST_TOLD = 20


@dataclass
class _Records:
    """The records of one producer, by sequence: a bit per reader that gave it back; how often it was handed
    out without a mark.
    """

    incarnation: int
    given_back: np.ndarray = field(default_factory=lambda: np.zeros(256, np.uint8))
    unmarked: dict[int, np.ndarray] = field(default_factory=dict)
    handed: int = 0

    def reach(self, end: int) -> None:
        if end > len(self.given_back):
            self.given_back = np.pad(
                self.given_back, (0, max(end, 2 * len(self.given_back)) - len(self.given_back))
            )

    def count_unmarked(self, scope: int, sequences: np.ndarray) -> np.ndarray:
        """Those that came without a mark before, or twice now."""
        counts = self.unmarked.get(scope, np.zeros(0, np.uint8))
        end = int(sequences.max(initial=-1)) + 1
        if end > len(counts):
            counts = np.pad(counts, (0, max(end, 2 * len(counts)) - len(counts)))
        self.unmarked[scope] = counts
        np.add.at(counts, sequences, 1)
        return np.unique(sequences[counts[sequences] > 1])


class WordReferee:
    """One run's. `everybody`: each of these readers must have given a record back; none: any one reader.

    `apart`: each reader is handed every record once; or else all readers together are.
    """

    def __init__(
        self, words: ProducerWords, everybody: frozenset[int] = frozenset(), *, apart: bool = False
    ) -> None:
        self._words, self._everybody, self._apart = words, everybody, apart
        self._records: dict[int, _Records] = {}
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []

    def producer_begins(self, number: int, incarnation: int) -> None:
        self._records[number] = _Records(incarnation)

    def reader_ended(self, reader: int, name: str, entries: np.ndarray, may_fall: int = 0) -> None:
        """Its log is final; `name` is for messages.

        `may_fall`: times that a record without a mark may come after a later one.
        """
        kinds, numbers, values = kinds_of(entries), numbers_of(entries), entries[:, 1].astype(np.int64)
        got = (kinds == Kind.GOT) | (kinds == Kind.GOT_AGAIN)
        gone = (kinds == Kind.RELEASING) | (kinds == Kind.RELEASING_MANY)
        for number in np.unique(numbers[got | gone]).tolist():
            mine = numbers == number
            records = self._records.get(number)
            if records is None:
                self._fault("phantom", number, values[mine].tolist(), f"{name}: there is no such producer")
                continue
            self._got(
                records,
                number,
                reader,
                name,
                values[mine & got],
                kinds[mine & got] == Kind.GOT_AGAIN,
                may_fall,
            )
            given = values[mine & gone]
            records.reach(int(given.max(initial=-1)) + 1)
            records.given_back[given] |= np.uint8(1 << reader)
        for place in np.flatnonzero(kinds == Kind.TORN):
            self._fault(
                "torn", int(numbers[place]), [int(values[place])], f"{name}: its bytes are not what was put"
            )

    def _got(
        self,
        records: _Records,
        number: int,
        reader: int,
        name: str,
        sequences: np.ndarray,
        marked: np.ndarray,
        may_fall: int,
    ) -> None:
        if not len(sequences):
            return
        end = int(sequences.max()) + 1
        records.reach(end)
        started = self._words.of(records.incarnation)[ProducerWords.STARTED]
        if end > started:
            self._fault(
                "phantom", number, [end - 1], f"{name}: its producer has begun only {started} records"
            )
        fresh = sequences[~marked]
        falls = fresh[1:] <= fresh[:-1]
        if falls.sum() > may_fall:
            self._fault(
                "out_of_order",
                number,
                fresh[1:][falls].tolist(),
                f"{name}: after {fresh[:-1][falls].tolist()[:5]}, no marks",
            )
        twice = records.count_unmarked(reader if self._apart and reader != LAST else 0, fresh)
        if len(twice):
            self._fault("unmarked", number, twice.tolist(), f"{name}: handed out before, and no mark")
        self.counts["records"] += len(fresh)
        self.counts["redelivered"] += int(marked.sum())
        records.handed = max(records.handed, end)

    def finish(self, may_miss: int = 0) -> None:
        """All processes are dead: each record that is known to be committed was given back, except `may_miss`
        of them.
        """
        wanted = sum(1 << reader for reader in self._everybody)
        for number, records in self._records.items():
            returned = self._words.of(records.incarnation)[ProducerWords.RETURNED]
            records.reach(returned)
            given = records.given_back[:returned]
            enough = (given & wanted) == wanted if wanted else given != 0
            missing = np.flatnonzero(~enough & ((given >> LAST) & 1 == 0))
            may_miss -= len(missing)
            if len(missing) and may_miss < 0:
                who = "not every rank" if wanted else "nobody"
                self._fault(
                    "lost",
                    number,
                    missing.tolist(),
                    f"released, and {who} who had seen them said so, of {returned}",
                )

    def _fault(self, what: str, number: int, sequences: list[int], why: str) -> None:
        more = f" and {len(sequences) - 8} more" if len(sequences) > 8 else ""
        self.fault(
            what, f"{producer_name(number)} records {sequences[:8]}{more}: {why}", max(len(sequences), 1)
        )

    def fault(self, what: str, message: str, count: int = 1) -> None:
        """A violation, also one that was found elsewhere."""
        assert what in VIOLATIONS
        self.counts[what] += count
        if len(self.told) < _MOST_TOLD:
            self.told.append(f"{what}: {message}")

    @property
    def violations(self) -> int:
        return sum(self.counts[name] for name in VIOLATIONS)
