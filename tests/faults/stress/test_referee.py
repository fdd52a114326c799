"""The referee of the kill fuzz finds every violation that it names, and lets correct logs pass. No process,
no bridge.
"""

import pytest
from fuzz.ledger import ConsumerLog, Kind, ProducerWords, number_of, producer_name
from fuzz.pattern import Pattern
from fuzz.referee import VIOLATIONS, Referee

P = number_of("p3.7")


class Game:
    """One producer of ten records, and one consumer after the other."""

    def __init__(self) -> None:
        self.words = ProducerWords()
        self.referee = Referee(self.words)
        self.referee.producer_begins(P, 0)
        self.put(10, 10)
        self.consumers = 0
        self.next_consumer()

    def put(self, started: int, returned: int) -> None:
        words = self.words.of(0)
        words[ProducerWords.STARTED], words[ProducerWords.RETURNED] = started, returned

    def next_consumer(self) -> None:
        if self.consumers:
            self.referee.consumer_ended()
        self.consumers += 1
        self.log = ConsumerLog()
        self.referee.consumer_begins(self.consumers, self.log)

    def write(self, kind: Kind, *values: int) -> "Game":
        for value in values:
            self.log.append(kind, P, value)
        return self

    def take(self, *sequences: int, again: bool = False, hold: bool = False) -> "Game":
        self.write(Kind.ASKED, len(sequences)).write(Kind.GOT_AGAIN if again else Kind.GOT, *sequences)
        return self.write(Kind.RELEASING, *sequences).write(Kind.NOTE, 0) if not hold else self

    def found(self) -> dict[str, int]:
        self.referee.consumer_ended()
        self.referee.finish()
        return {name: self.referee.counts[name] for name in VIOLATIONS if self.referee.counts[name]}


def play(turns: list[list[tuple]], started: int = 10) -> Game:
    """One consumer after the other: what each took, as (sequences, options), or wrote, as (kind, values)."""
    game = Game()
    game.put(started, 10)
    for number, moves in enumerate(turns):
        if number:
            game.next_consumer()
        for what, *rest in moves:
            if isinstance(what, Kind):
                game.write(what, *rest)
            else:
                game.take(*what, **dict.fromkeys(rest, True))
    return game


ALL = range(10)
ASKED, GOT, RELEASING = Kind.ASKED, Kind.GOT, Kind.RELEASING
UNDER_WAY = [(range(9),), (ASKED, 1), (GOT, 9), (RELEASING, 9)]
BATCH = [(range(4),), (Kind.ASKED_BATCHES, 8), (GOT, *range(4, 10)), (Kind.RELEASING_MANY, *range(4, 10))]
RIGHT = {
    "all in order": [[(ALL,)]],
    "what a dead one held comes again": [
        [(range(3),), ([3, 4], "hold")],
        [([3, 4], "again"), (range(5, 10),)],
    ],
    "a release under way that was over": [UNDER_WAY, []],
    "a release under way that was not": [UNDER_WAY, [([9], "again")]],
    "a batch whose release was under way": [BATCH, [([7, 9], "again")]],
    "marked, taken without a word": [[(range(4),), (ASKED, 3)], [([4, 5, 6], "again"), (range(7, 10),)]],
}
WRONG = {
    "again without a mark": ({"unmarked": 1}, [[(range(5), "hold")], [(range(4), "again"), (range(4, 10),)]]),
    "one does not come again": (
        {"lost": 1},
        [[(range(5), "hold")], [([0, 1, 3, 4], "again"), (range(5, 10),)]],
    ),
    "the last does not come again": ({"lost": 1}, [[(ALL, "hold")], [(range(9), "again")]]),
    "one is left out": ({"lost": 1}, [[([0, 1, 2, *range(4, 10)],)]]),
    "the last two never come": ({"lost": 2}, [[(range(8),)]]),
    "nobody put it": ({"phantom": 1}, [[(range(11),)]]),
    "a released one comes again": ({"came_again": 1}, [[(ALL,)], [([9], "again")]]),
    "a mark on what nobody had": (
        {"wrongly_marked": 2},
        [[(range(4),)], [([4, 5], "again"), (range(6, 10),)]],
    ),
    "more marks than were asked for": (
        {"wrongly_marked": 3},
        [[(range(4),), (ASKED, 2)], [([4, 5, 6], "again"), (range(7, 10),)]],
    ),
    "a mark after an unmarked one": (
        {"wrongly_marked": 1},
        [[(range(4),), (ASKED, 4)], [([4],), ([5], "again"), (range(6, 10),)]],
    ),
    "torn": ({"torn": 1}, [[(ALL,), (Kind.TORN, 5)]]),
}


@pytest.mark.parametrize("turns", RIGHT.values(), ids=RIGHT)
def test_the_referee_lets_what_is_right_pass(turns):
    assert play(turns).found() == {}


def test_one_more_than_the_producer_was_told_of_may_come():
    assert play([[(range(11),)]], started=11).found() == {}


@pytest.mark.parametrize(("found", "turns"), WRONG.values(), ids=WRONG)
def test_the_referee_finds(found, turns):
    assert play(turns).found() == found


@pytest.mark.parametrize("moves", [[([0, 2, 1, *range(3, 10)],)], [(ALL,), (GOT, 9), (RELEASING, 9)]])
def test_the_referee_finds_what_comes_out_of_order_or_twice(moves):
    assert "out_of_order" in play([moves]).found()


def test_the_referee_says_who_and_what(capsys):
    play([[([0, 2],)]]).found()
    said = capsys.readouterr().out
    for part in ("lost: p3.7 records [1]", "10 started, 10 returned", "consumer 1 wrote of it", "GOT p3.7 2"):
        assert part in said


def test_judging_in_pieces_finds_the_same():
    game = Game()
    for sequence in range(10):
        if sequence != 4:
            game.take(sequence)
        game.referee.look()
    assert game.found() == {"lost": 1}


class Given:
    """A record as a consumer sees it, made from a pattern."""

    class Column:
        def __init__(self, rows) -> None:
            import numpy as np

            self.values = np.concatenate(rows)
            self.lengths = np.array([len(row) for row in rows])

    def __init__(self, sequence: int, columns: dict) -> None:
        self._sequence, self.columns = sequence, list(columns)
        self._columns = {
            name: self.Column(rows) if name != "score" else rows for name, rows in columns.items()
        }

    def __getitem__(self, name):
        return self._columns[name]


def test_a_pattern_is_known_by_every_byte():
    pattern = Pattern(5)
    for sequence in range(600):
        columns = pattern.columns(P, sequence)
        assert pattern.is_whole(Given(sequence, columns), P)
        assert not pattern.is_whole(Given(sequence + 1, columns), P), "another record's bytes"
        assert not pattern.is_whole(Given(sequence, columns), P + 1), "another producer's bytes"
        for name in columns:
            wrong = Given(sequence, columns)
            values = wrong[name] if name == "score" else wrong[name].values
            wrong._columns[name] = changed = values.copy() if name == "score" else Given.Column([values])
            (changed if name == "score" else changed.values)[-1] += 1
            if name != "score":
                changed.lengths = Given(sequence, columns)[name].lengths
            assert not pattern.is_whole(wrong, P), f"the last value of {name} is another one"


def test_producers_have_names():
    assert producer_name(P) == "p3.7"
