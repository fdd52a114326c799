"""The referee of the kill fuzz sees every violation it has a word for, and lets what is right pass.

No process, no bridge.
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

    def take(self, *sequences: int, again: bool = False, release: bool = True) -> "Game":
        self.write(Kind.ASKED, len(sequences)).write(Kind.GOT_AGAIN if again else Kind.GOT, *sequences)
        return self.write(Kind.RELEASING, *sequences).write(Kind.NOTE, 0) if release else self

    def found(self) -> dict[str, int]:
        self.referee.consumer_ended()
        self.referee.finish()
        return {name: self.referee.counts[name] for name in VIOLATIONS if self.referee.counts[name]}


@pytest.fixture
def game():
    return Game()


def test_all_is_well(game):
    assert game.take(*range(10)).found() == {}
    assert game.referee.counts["records"] == 10


def test_what_a_dead_consumer_held_comes_again_marked(game):
    game.take(0, 1, 2).take(3, 4, release=False)
    game.next_consumer()
    game.take(3, 4, again=True).take(*range(5, 10))
    assert game.found() == {}
    assert (game.referee.counts["records"], game.referee.counts["redelivered"]) == (10, 2)


def test_it_comes_again_without_a_mark(game):
    game.take(*range(5), release=False)
    game.next_consumer()
    assert game.take(*range(4), again=True).take(*range(4, 10)).found() == {"unmarked": 1}


def test_it_does_not_come_again(game):
    game.take(*range(5), release=False)
    game.next_consumer()
    assert game.take(0, 1, 3, 4, again=True).take(*range(5, 10)).found() == {"lost": 1}


def test_the_last_of_it_does_not_come_again(game):
    game.take(*range(10), release=False)
    game.next_consumer()
    assert game.take(*range(9), again=True).found() == {"lost": 1}


def test_a_record_is_left_out(game):
    assert game.take(0, 1, 2, 4, 5, 6, 7, 8, 9).found() == {"lost": 1}


def test_the_last_records_never_come(game):
    assert game.take(*range(8)).found() == {"lost": 2}


def test_one_more_than_the_producer_was_told_of_may_come(game):
    game.put(11, 10)
    assert game.take(*range(11)).found() == {}


def test_a_record_nobody_put(game):
    assert game.take(*range(11)).found() == {"phantom": 1}


def test_a_released_record_comes_again(game):
    game.take(*range(10))
    game.next_consumer()
    assert game.take(9, again=True).found() == {"came_again": 1}


@pytest.mark.parametrize("again", [False, True])
def test_a_release_that_was_under_way_may_have_been_over(again, game):
    game.take(*range(9)).write(Kind.ASKED, 1).write(Kind.GOT, 9).write(Kind.RELEASING, 9)
    game.next_consumer()
    if again:
        game.take(9, again=True)
    assert game.found() == {}


def test_a_batch_whose_release_was_under_way(game):
    game.take(*range(4)).write(Kind.ASKED_BATCHES, 8).write(Kind.GOT, *range(4, 10)).write(
        Kind.RELEASING_MANY, *range(4, 10)
    )
    game.next_consumer()
    assert game.take(7, 9, again=True).found() == {}


def test_out_of_order(game):
    assert "out_of_order" in game.take(0, 2, 1, *range(3, 10)).found()


def test_twice_to_the_same_consumer(game):
    game.take(*range(10)).write(Kind.GOT, 9).write(Kind.RELEASING, 9)
    assert "out_of_order" in game.found()


def test_a_mark_on_what_nobody_had(game):
    game.take(*range(4))
    game.next_consumer()
    assert game.take(4, 5, again=True).take(*range(6, 10)).found() == {"wrongly_marked": 2}


def test_marks_on_what_a_dead_consumer_may_have_taken_without_a_word(game):
    game.take(*range(4)).write(Kind.ASKED, 3)
    game.next_consumer()
    game.take(4, 5, 6, again=True).take(*range(7, 10))
    assert game.found() == {}
    assert game.referee.counts["marked_in_hand_over"] == 3


def test_more_marks_than_it_may_have_taken(game):
    game.take(*range(4)).write(Kind.ASKED, 2)
    game.next_consumer()
    assert game.take(4, 5, 6, again=True).take(*range(7, 10)).found() == {"wrongly_marked": 3}


def test_a_mark_after_an_unmarked_one(game):
    game.take(*range(4)).write(Kind.ASKED, 4)
    game.next_consumer()
    assert game.take(4).take(5, again=True).take(*range(6, 10)).found() == {"wrongly_marked": 1}


def test_torn(game):
    assert game.take(*range(10)).write(Kind.TORN, 5).found() == {"torn": 1}


def test_it_says_who_and_what(game, capsys):
    game.take(0, 2).found()
    said = capsys.readouterr().out
    for part in ("lost: p3.7 records [1]", "10 started, 10 returned", "consumer 1 wrote of it", "GOT p3.7 2"):
        assert part in said


def test_judging_in_pieces_finds_the_same(game):
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
        self.sequence, self.columns = sequence, list(columns)
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
