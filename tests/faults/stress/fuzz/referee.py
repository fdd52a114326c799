"""Judges what consumers wrote down against what producers were told.

Every rule of guarantees 1 and 2 is one check here.

Knows entries and numbers only: it never sees a bridge. Entries of one consumer are judged in the order in
which it wrote them, chunk by chunk; of consumers one after the other. A record is in one of four states:

    NEW        in no log
    HELD       handed out; if its holder died, it must come again, marked
    RELEASED   its release is over; it must never come again
    DOUBT      its holder died in the release: it may come again, marked, or not
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .ledger import STATS, ConsumerLog, Kind, ProducerWords, describe, kinds_of, numbers_of, producer_name

NEW, HELD, RELEASED, DOUBT = range(4)
VIOLATIONS = (
    "lost",
    "unmarked",
    "wrongly_marked",
    "came_again",
    "out_of_order",
    "torn",
    "phantom",
    "miscounted",
    "leaked",
    "failed",
)
_MOST_TOLD = 40


@dataclass
class _Records:
    """The known facts about one producer's records."""

    incarnation: int
    state: np.ndarray = field(default_factory=lambda: np.zeros(256, np.uint8))
    handed: int = 0  # every sequence below was written down by some consumer, or released before it could be

    def reach(self, end: int) -> None:
        if end > len(self.state):
            self.state = np.concatenate(
                (self.state, np.zeros(max(end, 2 * len(self.state)) - len(self.state), np.uint8))
            )


@dataclass
class _Tenure:
    """The records that one consumer has been given so far."""

    incarnation: int
    log: ConsumerLog
    last: dict[int, int] = field(default_factory=dict)  # producer -> sequence
    # producer -> below it everything must be marked
    handed_before: dict[int, int] = field(default_factory=dict)
    unmarked: set[int] = field(default_factory=set)  # producers that have given an unmarked one
    asked: int = 0
    on_their_way: int = 0  # records that may have been taken and were not written down
    batches: bool = False
    tail: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.uint64))  # its last entries


class Referee:
    """One run's."""

    def __init__(self, words: ProducerWords) -> None:
        self._words = words
        self._records: dict[int, _Records] = {}
        self._tenure: _Tenure | None = None
        self._doubt = 0  # records that dead consumers may have taken without a word
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []
        self.stats: list[dict[str, int]] = []  # of the present consumer, one per count

    # -- who there is
    # --------------------------------------------------------------------------------------------------------

    def producer_begins(self, number: int, incarnation: int) -> None:
        self._records[number] = _Records(incarnation)

    def consumer_begins(self, incarnation: int, log: ConsumerLog) -> None:
        self._tenure = _Tenure(incarnation, log)
        self.stats = []

    def consumer_ended(self) -> None:
        """The consumer is dead and its log is final: a call under way is in doubt, held records must come
        again.
        """
        self.look()
        tenure = self._tenure
        assert tenure is not None
        self._doubt += tenure.on_their_way
        kinds, numbers = kinds_of(tenure.tail), numbers_of(tenure.tail)
        for place in range(len(kinds) - 1, -1, -1):
            kind = kinds[place]
            if kind != Kind.RELEASING_MANY and not (kind == Kind.RELEASING and place == len(kinds) - 1):
                break
            self._records[int(numbers[place])].state[int(tenure.tail[place, 1])] = DOUBT
            if kind == Kind.RELEASING:
                break
        self._tenure = None

    # -- judging
    # --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Judges what was written since the last look."""
        tenure = self._tenure
        if tenure is None:
            return
        entries = tenure.log.unread()
        if not len(entries):
            return
        tenure.tail = np.concatenate((tenure.tail, entries))[-64:]
        kinds, numbers, values = kinds_of(entries), numbers_of(entries), entries[:, 1].astype(np.int64)
        got = (kinds == Kind.GOT) | (kinds == Kind.GOT_AGAIN)
        gone = (kinds == Kind.RELEASING) | (kinds == Kind.RELEASING_MANY)
        for number in np.unique(numbers[got | gone]).tolist():
            mine = numbers == number
            self._got(tenure, number, values[mine & got], kinds[mine & got] == Kind.GOT_AGAIN)
            self._gone(number, values[mine & gone])
        for place in np.flatnonzero(kinds == Kind.TORN):
            self._fault("torn", int(numbers[place]), [int(values[place])], "its bytes are not what was put")
        self._stats(numbers[kinds == Kind.STAT].tolist(), values[kinds == Kind.STAT].tolist())
        self._asked(tenure, kinds, values, got)
        tenure.log.forget()

    def _asked(self, tenure: _Tenure, kinds: np.ndarray, values: np.ndarray, got: np.ndarray) -> None:
        for place in np.flatnonzero(kinds == Kind.ASKED_BATCHES):
            tenure.batches, tenure.on_their_way = True, int(values[place])
        if tenure.batches:
            return
        asked = np.flatnonzero(kinds == Kind.ASKED)
        since = int(asked[-1]) if len(asked) else 0
        if len(asked):
            tenure.on_their_way = int(values[since])
        tenure.on_their_way = max(tenure.on_their_way - int(got[since:].sum()), 0)

    def _got(self, tenure: _Tenure, number: int, sequences: np.ndarray, marked: np.ndarray) -> None:
        if not len(sequences):
            return
        records = self._known(number)
        end = int(sequences.max()) + 1
        records.reach(end)
        state = records.state
        before = tenure.handed_before.setdefault(number, records.handed)
        self._check_order(tenure, number, sequences, state)
        again = state[sequences] == RELEASED
        if again.any():
            self._fault("came_again", number, sequences[again].tolist(), "its release was over before")
        unmarked = (sequences < before) & ~marked
        if unmarked.any():
            self._fault(
                "unmarked",
                number,
                sequences[unmarked].tolist(),
                f"no mark, and an earlier consumer had all below {before}",
            )
        self._check_marks(tenure, number, sequences, marked, before)
        started = self._words.of(records.incarnation)[ProducerWords.STARTED]
        if end > started:
            self._fault("phantom", number, [end - 1], f"its producer has begun only {started} records")
        self.counts["records"] += int((state[sequences] == NEW).sum())
        self.counts["redelivered"] += int(marked.sum())
        state[sequences] = HELD
        tenure.last[number] = int(sequences[-1])
        records.handed = max(records.handed, end)

    def _check_order(self, tenure: _Tenure, number: int, sequences: np.ndarray, state: np.ndarray) -> None:
        """Rising, and whatever is left out was released before this consumer came."""
        previous = np.concatenate(([tenure.last.get(number, -1)], sequences[:-1]))
        wrong = sequences <= previous
        if wrong.any():
            self._fault(
                "out_of_order",
                number,
                sequences[wrong].tolist(),
                f"they come after {previous[wrong].tolist()[:5]}",
            )
        for place in np.flatnonzero(sequences > previous + 1):
            first, end = int(previous[place]) + 1, int(sequences[place])
            missing = first + np.flatnonzero((state[first:end] != RELEASED) & (state[first:end] != DOUBT))
            if len(missing):
                self._fault("lost", number, missing.tolist(), f"record {end} comes and they have not")
                state[missing] = RELEASED  # told once

    def _check_marks(
        self, tenure: _Tenure, number: int, sequences: np.ndarray, marked: np.ndarray, before: int
    ) -> None:
        """A mark on what no log has: an earlier consumer may have died in between, for so many records and no
        unmarked one first.
        """
        unexplained = marked & (sequences >= before)
        count = int(unexplained.sum())
        if count:
            first_unmarked = int(np.argmin(marked)) if not marked.all() else len(marked)
            late = number in tenure.unmarked or first_unmarked < int(np.flatnonzero(unexplained)[-1])
            if late or count > self._doubt:
                why = (
                    "after an unmarked one" if late else f"dead consumers had at most {self._doubt} under way"
                )
                self._fault(
                    "wrongly_marked",
                    number,
                    sequences[unexplained].tolist(),
                    f"nobody can have had it: {why}",
                )
            self._doubt -= min(count, self._doubt)
            self.counts["marked_in_hand_over"] += count
        if not marked.all():
            tenure.unmarked.add(number)

    def _gone(self, number: int, sequences: np.ndarray) -> None:
        records = self._known(number)
        if not len(sequences):
            return
        odd = sequences[records.state[sequences] != HELD]
        if len(odd):
            self._fault(
                "failed",
                number,
                odd.tolist(),
                "released by a consumer that did not have it: the fuzz itself is wrong",
            )
        records.state[sequences] = RELEASED

    def _known(self, number: int) -> _Records:
        if number not in self._records:
            self._fault("phantom", number, [], "there is no such producer")
            self._records[number] = _Records(0)
        return self._records[number]

    def _stats(self, places: list[int], values: list[int]) -> None:
        for place, value in zip(places, values, strict=True):
            if place == 0:
                self.stats.append({})
            self.stats[-1][STATS[place]] = value

    def finish(self) -> None:
        """All processes are dead: every record that was known to be committed has been handed out, and all
        were released.
        """
        for number, records in self._records.items():
            words = self._words.of(records.incarnation)
            returned = words[ProducerWords.RETURNED]
            if records.handed < returned:
                self._fault(
                    "lost",
                    number,
                    list(range(records.handed, returned)),
                    f"never came; its producer was told of {returned}",
                )
            state = records.state[: records.handed]
            left = np.flatnonzero((state != RELEASED) & (state != DOUBT))
            if len(left):
                self._fault("lost", number, left.tolist(), "did not come again after its holder died")

    def handed_of(self, number: int) -> int:
        """Records of the producer that were handed out so far."""
        return self._records[number].handed

    # -- telling
    # --------------------------------------------------------------------------------------------------------

    def _fault(self, what: str, number: int, sequences: list[int], why: str) -> None:
        """Counts it and says everything that is needed to find it."""
        records = self._records.get(number)
        words = self._words.of(records.incarnation) if records else [0, 0]
        tenure = self._tenure
        more = f" and {len(sequences) - 8} more" if len(sequences) > 8 else ""
        lines = [
            f"{what}: {producer_name(number)} records {sequences[:8]}{more}: {why}",
            (
                f"  its producer: {words[0]} started, {words[1]} returned; handed out so far: all below "
                f"{records.handed if records else 0}"
            ),
        ]
        if tenure is not None:
            lines.append(f"  consumer {tenure.incarnation} wrote of it: {self._lines_about(tenure, number)}")
            lines.append(f"  and last of all: {'; '.join(describe(tenure.tail[-6:]))}")
        self.fault(what, "\n".join(lines), max(len(sequences), 1))

    def _lines_about(self, tenure: _Tenure, number: int) -> str:
        last = tenure.log.last(20_000)
        return (
            "; ".join(describe(last[(numbers_of(last) == number) & (kinds_of(last) != Kind.STAT)][-8:]))
            or "nothing"
        )

    def fault(self, what: str, message: str, count: int = 1) -> None:
        """A violation, also one that was found elsewhere."""
        assert what in VIOLATIONS
        self.counts[what] += count
        if len(self.told) < _MOST_TOLD:
            self.told.append(message)
            print(message, flush=True)
