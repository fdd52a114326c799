"""Dealing out shares, and the book of shares, against properties that hold in every case."""

from itertools import permutations
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmbridge.hub import ShareBook, share_out

QUIET = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def group(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(tokens=tokens, rows=2)


@QUIET
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=64), st.integers(1, 8))
def test_shares_are_dealt_out_evenly(tokens, world_size):
    """Every group once, counts as even as can be, oldest first, and no rank worse off than by the longest
    group.
    """
    ranks = list(range(min(world_size, len(tokens))))
    groups = [group(each) for each in tokens]
    dealt = share_out(groups, ranks)
    assert sorted(map(id, groups)) == sorted(id(each) for share in dealt.values() for each in share)
    counts = [len(dealt[rank]) for rank in ranks]
    assert max(counts) - min(counts) <= 1
    order = {id(each): place for place, each in enumerate(groups)}
    assert all(
        [order[id(each)] for each in share] == sorted(order[id(each)] for each in share)
        for share in dealt.values()
    )
    if len(tokens) % len(ranks) == 0:
        sums = [sum(each.tokens for each in dealt[rank]) for rank in ranks]
        assert max(sums) - min(sums) <= max(tokens) * (len(tokens) // len(ranks))


def test_tokens_are_balanced():
    """One long group and three short ones for two ranks: not the two oldest for one."""
    dealt = share_out([group(800), group(700), group(100), group(200)], [0, 1])
    assert [sum(each.tokens for each in dealt[rank]) for rank in (0, 1)] == [900, 900]


class Book(RuleBasedStateMachine):
    """Ranks that ask, die, come again, say done late or twice; compared with the groups that each really
    reads.
    """

    @initialize(world_size=st.integers(1, 3), mode=st.sampled_from(["sharded", "broadcast"]))
    def begin(self, world_size, mode):
        self.mode, self.ranks = mode, list(range(world_size))
        self.book = ShareBook(world_size, mode)
        self.clock = 0
        self.member = dict.fromkeys(self.ranks, 0)
        self.living = set(self.ranks)
        self.after = dict.fromkeys(self.ranks, -1)
        # rank -> share -> groups under its eyes
        self.looking: dict[int, dict[int, list]] = {rank: {} for rank in self.ranks}
        self.released: set[int] = set()
        self.read: set[int] = set()  # groups that some rank has looked at and said done
        self.opened: list = []
        self.fed: list = []  # steps of a feed
        self.ended: list = []
        self.dead_said: list[tuple[int, int, list[int]]] = []  # what the dead had under way

    def finish(self, groups):
        for each in groups:
            assert id(each) not in self.released, "released twice"
            assert id(each) in self.read, "released, and no rank said that it is done with it"
            self.released.add(id(each))
        for step in self.fed:
            if over := self.released & set(map(id, step.groups)):
                assert step in self.ended, "released, and its feed did not end it"
                assert len(over) == len(step.groups), "released in part"

    def one_of(self, data, ranks) -> int | None:
        return data.draw(st.sampled_from(sorted(ranks)), "rank") if ranks else None

    @rule(tokens=st.lists(st.integers(1, 9), min_size=1, max_size=6), fed=st.booleans())
    def open(self, tokens, fed):
        if len(self.opened) < 12 and (fed or len(tokens) >= 3):
            groups = [group(each) for each in tokens]
            self.opened += groups
            step = self.book.open(groups, 0, self.ranks, (lambda failed: None) if fed else None)
            self.fed += [step] if fed else []

    @rule(data=st.data())
    def end(self, data):
        """The feed says that a step is trained, or its checkpoint durable."""
        if self.fed:
            step = data.draw(st.sampled_from(self.fed), "step")
            self.ended.append(step)
            self.finish(self.book.end(step))
            assert self.book.end(step) == [], "a second end changes nothing"

    @rule(data=st.data(), lost=st.booleans())
    def ask(self, data, lost):
        if (rank := self.one_of(data, self.living)) is not None:
            self.look(rank, lost)

    def look(self, rank, lost=False):
        share = self.book.next_for(rank, self.member[rank], self.after[rank])
        if share is not None and not lost:
            self.after[rank] = share.number
            self.looking[rank][share.number] = share.groups

    @rule(data=st.data(), dies=st.booleans())
    def done(self, data, dies):
        if (rank := self.one_of(data, self.living)) is None:
            return
        if not self.looking[rank]:
            self.look(rank)
        if not self.looking[rank]:
            return
        number = min(self.looking[rank])
        self.read |= {id(each) for each in self.looking[rank][number]}
        if dies:  # with the message in the socket
            self.dead_said.append((rank, self.member[rank], [number]))
            self.die(rank)
            return
        self.looking[rank].pop(number)
        self.finish(self.book.done(rank, self.member[rank], [number]))
        assert self.book.done(rank, self.member[rank], [number, number]) == [], (
            "a second done changes nothing"
        )

    @rule()
    def a_dead_ones_message_arrives(self):
        for rank, member, numbers in self.dead_said:
            self.finish(self.book.done(rank, member, numbers))
            if member < self.member[rank]:
                assert self.book.next_for(rank, member, -1) is None, "issued to one that is dead"

    @rule(data=st.data())
    def someone_dies(self, data):
        if (rank := self.one_of(data, self.living)) is not None:
            self.die(rank)

    @rule(data=st.data())
    def a_successor_comes(self, data):
        if (rank := self.one_of(data, set(self.ranks) - self.living)) is None:
            return
        self.clock += 1
        self.member[rank], self.after[rank] = self.clock, -1
        self.living.add(rank)
        self.book.next_for(rank, self.clock, 1 << 30)  # it says that it is there

    @rule()
    def spread(self):
        """The hub looks for the dead."""
        if self.living:
            for dead in sorted(set(self.ranks) - self.living):
                self.finish(self.book.hand_over(dead, sorted(self.living)))

    @rule(data=st.data())
    def one_goes_and_another_comes_back(self, data):
        """The steps by which a share loses all its readers one by one."""
        if len(self.living) < 2:
            self.a_successor_comes(data)
        self.someone_dies(data)
        self.spread()

    def die(self, rank):
        self.living.discard(rank)
        self.looking[rank] = {}

    @invariant()
    def nobodys_view_changes(self):
        for rank in getattr(self, "living", ()):
            for groups in self.looking[rank].values():
                assert not self.released & set(map(id, groups)), "released under the eyes of a rank"

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "book"):
            kept = {id(each) for share in self.book for each in share.groups}
            kept |= {id(each) for step in self.fed for each in step.read}
            assert kept | self.released == set(map(id, self.opened))
            assert all(share.readers for share in self.book)


TestBook = Book.TestCase
TestBook.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


@pytest.mark.parametrize("said", [False, True])
def test_a_broadcast_share_ends_with_its_last_reader_only_if_somebody_was_done(said):
    """Rank 1 died before it was issued anything, came back, and is all that is left when rank 0 dies."""
    book, groups = ShareBook(2, "broadcast"), [group(1)]
    book.open(groups, 0, [0, 1])
    assert book.hand_over(1, [0]) == []
    number = book.next_for(0, 1, -1).number
    if said:
        assert book.done(0, 1, [number]) == groups
        return
    assert book.hand_over(0, [1]) == []
    moved = book.next_for(1, 2, number)
    assert (moved.groups, moved.reissued) == (groups, True)
    assert book.done(0, 1, [number]) == [], "the dead one's word comes too late"
    assert book.done(1, 2, [moved.number]) == groups


@pytest.mark.parametrize("order", permutations(["end", 0, 1]), ids=str)
@pytest.mark.parametrize("mode", ["sharded", "broadcast"])
def test_a_step_of_a_feed_is_over_as_a_whole_and_by_the_last_of_three_words(mode, order):
    book, groups = ShareBook(2, mode), [group(1), group(2)]
    step = book.open(groups, 0, [0, 1], lambda failed: None)
    numbers = [book.next_for(rank, 7, -1).number for rank in (0, 1)]
    over = [book.end(step) if each == "end" else book.done(each, 7, [numbers[each]]) for each in order]
    assert over[:2] == [[], []]
    assert sorted(map(id, over[2])) == sorted(map(id, groups))
    assert book.end(step) == []


def test_a_dead_reader_does_not_undo_what_another_has_said():
    book, groups = ShareBook(2, "broadcast"), [group(1)]
    book.open(groups, 0, [0, 1])
    number = book.next_for(0, 1, -1).number
    assert book.done(0, 1, [number]) == []
    assert book.hand_over(1, [0]) == groups


def test_stale_batches_are_withdrawn_until_someone_has_seen_a_part():
    book = ShareBook(2, "sharded")
    first, second = [group(1), group(2)], [group(3), group(4)]
    book.open(first, 0, [0, 1])
    book.open(second, 0, [0, 1])
    book.next_for(0, 1, -1)
    assert book.withdraw(lambda each: True) == second
    assert book.open_steps == 1


@pytest.mark.parametrize("mode", ["sharded", "broadcast"])
def test_a_lost_answer_comes_again_and_is_no_new_issue(mode):
    book = ShareBook(2, mode)
    book.open([group(1), group(2)], 0, [0, 1])
    first = book.next_for(0, 7, -1)
    assert book.next_for(0, 7, -1) is first
    assert not first.reissued
    assert book.next_for(0, 8, -1) is first
    assert first.reissued


def test_the_message_of_a_dead_rank_does_not_end_its_successors_share():
    book, groups = ShareBook(1, "sharded"), [group(1)]
    book.open(groups, 0, [0])
    number = book.next_for(0, 1, -1).number
    assert book.next_for(0, 2, -1).reissued
    assert book.done(0, 1, [number]) == [], "the successor looks at it"
    assert book.next_for(0, 1, -1) is None, "nothing is issued to the dead"
    assert book.done(0, 2, [number]) == groups


def test_the_message_of_a_dead_rank_counts_until_its_share_is_issued_again():
    book, groups = ShareBook(1, "sharded"), [group(1)]
    book.open(groups, 0, [0])
    number = book.next_for(0, 1, -1).number
    assert book.done(0, 1, [number]) == groups
    assert book.next_for(0, 2, -1) is None
