"""Shares: which learner rank reads which groups of a batch, and which ranks are not done yet."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from shmbridge.record.groups import Group

Mode = Literal["sharded", "broadcast"]


def share_out(groups: list[Group], ranks: list[int]) -> dict[int, list[Group]]:
    """Deals whole groups out, in equal counts (to one) and then about equal tokens; oldest first in a share.

    Longest group first, each to the rank with the fewest tokens that still needs a group (the LPT rule of R.
    L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969, with a limit on the count).
    """
    most, rest = divmod(len(groups), len(ranks))
    dealt: dict[int, list[int]] = {rank: [] for rank in ranks}
    tokens = dict.fromkeys(ranks, 0)
    for place in sorted(range(len(groups)), key=lambda place: -groups[place].tokens):
        larger = sum(len(places) > most for places in dealt.values())
        open_to = [
            rank for rank in ranks if len(dealt[rank]) < most or (len(dealt[rank]) == most and larger < rest)
        ]
        rank = min(open_to, key=lambda rank: (tokens[rank], len(dealt[rank])))
        dealt[rank].append(place)
        tokens[rank] += groups[place].tokens
    return {rank: [groups[place] for place in sorted(places)] for rank, places in dealt.items()}


@dataclass(slots=True)
class Step:
    """One global batch: all its groups, oldest first, and the policy version it was formed under.

    One of a feed is over as a whole: once `end` was called for it, and no rank reads any of it.
    """

    number: int
    groups: list[Group]
    policy_version: int
    failed: Callable[[list[Group]], None] | None = None  # of a feed: what gets the groups reported as failed
    ended: bool = False
    issued: bool = False  # a part of it has been handed out
    read: list[Group] = field(default_factory=list)  # that no rank reads any more, and that are not over

    @property
    def rows(self) -> int:
        """Rows of all its shares."""
        return sum(group.rows for group in self.groups)

    @property
    def tokens(self) -> int:
        """Tokens of all its shares."""
        return sum(group.tokens for group in self.groups)


@dataclass(slots=True)
class Share:
    """Groups that the same ranks read: `readers` are the ranks not done yet.

    `issued` maps a rank to the incarnation that got the share last. Until `read`, when some rank is done with
    it, the share is never over.
    """

    number: int
    step: Step
    groups: list[Group]
    readers: set[int]
    issued: dict[int, int] = field(default_factory=dict)
    reissued: bool = False
    read: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all its groups."""
        return sum(group.tokens for group in self.groups)


class ShareBook:
    """The shares that a rank still reads or will read. Not thread-safe."""

    def __init__(self, world_size: int, mode: Mode) -> None:
        self.world_size, self.mode = world_size, mode
        self._shares: dict[int, Share] = {}  # by number, rising
        self._members: dict[int, int] = {}  # rank -> its newest incarnation
        self._next_share = self._next_step = 0
        self.reissues = self.issued_steps = 0

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    @property
    def open_steps(self) -> int:
        """Batches with a share that is not done."""
        return len({share.step.number for share in self})

    def open(
        self,
        groups: list[Group],
        policy_version: int,
        ranks: list[int],
        failed: Callable[[list[Group]], None] | None = None,
    ) -> Step:
        """Adds a formed batch, or with `failed` a feed's: shares of it for these ranks. Returns its step."""
        step = Step(self._next_step, groups, policy_version, failed)
        self._next_step += 1
        if self.mode == "broadcast":
            self._add(step, groups, set(ranks))
        else:
            for rank, dealt in share_out(groups, ranks).items():
                self._add(step, dealt, {rank})
        return step

    def _add(self, step: Step, groups: list[Group], readers: set[int]) -> None:
        self._shares[self._next_share] = Share(self._next_share, step, groups, readers)
        self._next_share += 1

    def next_for(self, rank: int, member: int, after: int) -> Share | None:
        """Returns the rank's first share after number `after`, now issued to `member`; repeats a lost answer.

        Issues nothing to an incarnation that has a successor: its question was under way when it died.
        """
        if member < self._members.get(rank, member):
            return None
        self._members[rank] = member
        for share in self:
            if share.number > after and rank in share.readers:
                if share.issued.get(rank, member) != member:
                    share.reissued = True
                    self.reissues += 1
                share.issued[rank] = member
                self.issued_steps += not share.step.issued
                share.step.issued = True
                return share
        return None

    def done(self, rank: int, member: int, numbers: Iterable[int]) -> list[Group]:
        """Marks these shares as done by the rank; returns the groups that no rank reads any more. Idempotent.

        Only for the incarnation that a share was last issued to: another one may still be reading it.
        """
        finished: list[Group] = []
        for share in [self._shares[number] for number in numbers if number in self._shares]:
            if rank in share.readers and share.issued.get(rank) == member:
                share.readers.discard(rank)
                share.read = True
                finished += self._end_if_read(share)
        return finished

    def failed(self, rank: int, member: int, failed: dict[int, list[int]]) -> list[tuple[Step, list[Group]]]:
        """Returns the groups of shares that a rank still reads, by their places; without places all.

        Only of the incarnation that a share was last issued to.
        """
        shares = [
            (self._shares[number], places) for number, places in failed.items() if number in self._shares
        ]
        return [
            (
                share.step,
                [share.groups[each] for each in places if 0 <= each < len(share.groups)] or share.groups,
            )
            for share, places in shares
            if rank in share.readers and share.issued.get(rank) == member
        ]

    def end(self, step: Step) -> list[Group]:
        """Ends the step of a feed; returns its groups if no rank reads any of it. Idempotent."""
        step.ended = True
        return self._over(step)

    def _over(self, step: Step) -> list[Group]:
        """Returns the groups of a step that are over now."""
        if step.failed is not None and not (step.ended and all(share.step is not step for share in self)):
            return []
        over, step.read = step.read, []
        return over

    def hand_over(self, dead: int, living: list[int]) -> list[Group]:
        """Removes a dead rank as a reader; returns the groups that are over by that.

        A share that no other rank reads or has read goes to the living ranks: in broadcast to all of them,
        else to the one with the fewest tokens before it. A share that moves gets a new number, so that its
        new reader has not seen that number.
        """
        finished: list[Group] = []
        for share in [share for share in self if dead in share.readers]:
            share.readers.discard(dead)
            if not share.readers and not share.read:
                self._move(share, set(living) if self.mode == "broadcast" else {self._least_loaded(living)})
            else:
                finished += self._end_if_read(share)
        return finished

    def _least_loaded(self, living: list[int]) -> int:
        load = {rank: sum(share.tokens for share in self if rank in share.readers) for rank in living}
        return min(living, key=lambda rank: load[rank])

    def _move(self, share: Share, heirs: set[int]) -> None:
        del self._shares[share.number]
        self.reissues += bool(share.issued)
        self._shares[self._next_share] = Share(
            self._next_share, share.step, share.groups, heirs, reissued=bool(share.issued)
        )
        self._next_share += 1

    def withdraw(self, unfit: Callable[[Group], bool]) -> list[Group]:
        """Withdraws unissued batches with an unfit group; returns their groups, oldest first."""
        steps = {share.step.number: share.step for share in self if not share.step.issued}
        unfit_steps = {number: step for number, step in steps.items() if any(map(unfit, step.groups))}
        self._shares = {
            number: share for number, share in self._shares.items() if share.step.number not in unfit_steps
        }
        return [group for step in unfit_steps.values() for group in step.groups]

    def _end_if_read(self, share: Share) -> list[Group]:
        """Ends a share that was read and has no readers left: the only end of groups dealt out."""
        if share.readers or not share.read:
            return []
        del self._shares[share.number]
        share.step.read += share.groups
        return self._over(share.step)
