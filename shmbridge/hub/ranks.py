"""The hub's side of learner ranks: deals shares out, and keeps their leases until all are read.

It forms batches ahead, in a thread, or deals out those that a feed gives it, which ends them. Locks show
which ranks live. The other side is rank.py. Why a rank's memory does not change while it reads, even when a
hub or a rank dies: docs/adr/0002-ranks.md.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shmbridge._ext import header
from shmbridge.config import check_choice, check_count, deadline_of
from shmbridge.control.messages import (
    BAD_VALUE,
    NO_MORE_BATCHES,
    OTHER_EPOCH,
    Ack,
    GroupPlaces,
    Manifest,
    NextShare,
    NoMoreShares,
    RecordPlace,
    Refused,
    SharesDone,
)
from shmbridge.errors import BadArgument, BatchTooBig
from shmbridge.hub.former import BatchRequest, is_stale
from shmbridge.record import Group, lane_name
from shmbridge.schema import Split
from shmbridge.segments import MOST_RANKS, Joined, LockByte, is_locked, then_close

if TYPE_CHECKING:
    from shmbridge.hub.hub import Hub

Mode = Literal["sharded", "broadcast"]
_MOST_RECORDS = 30_000  # of one share: messages.MAX_MESSAGE_BYTES at 34 bytes a record
_LOOK_EVERY_S = 0.2
log = logging.getLogger(__name__)
DeadRank = Literal["wait", "spread"]


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


class ShareDealer:
    """Deals batches out to learner ranks. Its users hold a RankServer.

    With `groups` it forms the batches itself, in a separate thread; else it deals what `deal` gets.
    """

    def __init__(
        self,
        hub: "Hub",
        *,
        world_size: int,
        groups: int | None,
        mode: Mode,
        max_staleness: int | None,
        prefetch: int,
        dead_rank: DeadRank,
        split: Split | None,
    ) -> None:
        world_size = check_count("world_size", world_size, 1, MOST_RANKS)
        prefetch = check_count("prefetch", prefetch, 0, 1024)
        check_choice("mode", mode, ("sharded", "broadcast"))
        check_choice("dead_rank", dead_rank, ("wait", "spread"))
        if groups is not None:
            BatchRequest(hub.former.want(groups, None), split=split)  # checks them
        if mode == "sharded" and groups is not None and groups < world_size:
            raise BadArgument(
                f"groups={groups}: each of {world_size} ranks needs one of every batch",
                hint=f'groups={world_size} or more, or mode="broadcast"',
            )
        self.world_size = world_size
        self._hub, self._former, self._state, self._closing = hub, hub.former, hub.state, hub.closing
        self._groups, self._split, self._dead_rank = groups, split, dead_rank
        # a feed has cut what is stale, and deals what is wanted now
        self._max_staleness = None if groups is None else hub.former.most_stale(max_staleness)
        self._steps_ahead = 0 if groups is None else 1 + prefetch
        self._book = ShareBook(world_size, mode)
        self._known: set[int] = set()  # ranks that were alive at the last check, or have asked since
        self._dead: set[int] = set()  # ranks that have died
        self._asking: set[int] = set()  # ranks that wait for a batch which is not formed yet
        self._done = 0
        self._looked_s = 0.0
        self._drained, self._withdrawn, self._failed = False, False, ""
        self._stop = threading.Event()
        self._change = threading.Condition(hub.closing.lock())
        self._thread = None if groups is None else Joined(self._run, f"shmbridge-ranks-{hub.bridge}")
        try:
            if self._thread is not None:
                self._thread.start()
        except BaseException:
            self.stop()
            raise

    # -- forming batches, or getting them

    @then_close
    def deal(self, groups: list[Group], failed: Callable[[list[Group]], None]) -> Callable[[], None]:
        """Deals out a step of a feed; returns what ends it. Never blocks; any thread.

        Its groups are released once it has ended and every rank is done with them. `failed` is called in the
        control plane's thread with groups that a rank reports as failed. Raises BatchTooBig.
        """
        self._check_sayable(groups)
        return functools.partial(self._end, self._deal(groups, failed))

    def _deal(self, groups: list[Group], failed: Callable[[list[Group]], None] | None = None) -> Step:
        with self._change:
            self._drained, takers = False, self._takers()
            step = self._book.open(groups, self._state.policy_version, takers, failed)
        self._hub.look_again()
        return step

    def _end(self, step: Step) -> None:
        with self._change:
            self._finish(self._book.end(step))

    @then_close
    def drained(self) -> None:
        """Tells the ranks that a feed has no further step. Never blocks; any thread."""
        with self._change:
            self._drained = True
            self._say_if_finished()
            self._change.notify_all()
        self._hub.look_again()

    def _run(self) -> None:
        try:
            while self._wait_for_room():
                request = BatchRequest(
                    self._former.want(self._groups, None),
                    max_staleness=self._max_staleness,
                    split=self._split,
                )
                groups = self._former.choose(request, self._stop)
                if groups is None:
                    self._wait_drained()
                    continue
                try:
                    self._check_sayable(groups)
                except Exception:
                    self._former.put_back(groups)
                    raise
                self._deal(groups)
        except Exception as error:  # any error must reach the ranks
            log.exception("bridge %r forms no more batches for its ranks", self._state.bridge)
            with self._change:
                self._failed = f"{type(error).__name__}: {error}"
                self._change.notify_all()
            self._hub.look_again()

    def _check_sayable(self, groups: list[Group]) -> None:
        """Raises if a share could have more records than a message can name."""
        # The number wanted, except under a policy that counts rows. A feed's step may leave a rank without.
        if self._book.mode == "sharded" and len(groups) < self.world_size and self._groups is not None:
            raise ValueError(
                f"a batch of {len(groups)} groups, and each of {self.world_size} ranks needs one: raise "
                "run.batch_size"
            )
        records = sum(len(group.records) for group in groups)
        shares = self.world_size if self._book.mode == "sharded" else 1
        if records > _MOST_RECORDS * shares:
            raise BatchTooBig(
                f"a batch of {len(groups)} groups has {records} records, and a manifest names "
                f"{_MOST_RECORDS}",
                hint="ask for fewer groups, or put groups whole: one record each",
            )

    def _wait_for_room(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._stop.is_set() or self._book.open_steps < self._steps_ahead)
        return not self._stop.is_set()

    def _wait_drained(self) -> None:
        """Tells the ranks that nothing more can be formed, unless the reason is that this consumer closes.

        Then waits until a batch is withdrawn or the server stops.
        """
        with self._change:
            self._drained = not (self._withdrawn or self._closing.ending or self._stop.is_set())
            self._say_if_finished()  # before a waiting thread is told, and closes
            self._change.notify_all()
        if self._drained:
            self._hub.look_again()
        with self._change:
            self._change.wait_for(lambda: self._stop.is_set() or self._withdrawn)
            if self._withdrawn:
                self._withdrawn = self._drained = False

    def _takers(self) -> list[int]:
        """Returns the ranks that a new batch is for: all, without dead ones if their work is spread."""
        everybody = set(range(self.world_size))
        return sorted((everybody - self._dead if self._dead_rank == "spread" else everybody) or everybody)

    def _living(self) -> list[int]:
        fd = self._state.control_fd
        return [rank for rank in range(self.world_size) if is_locked(fd, LockByte.FIRST_RANK + rank)]

    # -- answering, in the control plane's thread

    def next_share(self, request: NextShare) -> Manifest | NoMoreShares | Refused | None:
        """Returns the rank's next share; None while there is none. Never blocks."""
        if request.epoch != self._state.hub_epoch:
            return self._other_epoch(request.epoch)
        if request.world_size != self.world_size or not 0 <= request.rank < self.world_size:
            said = (
                f"rank {request.rank} of {request.world_size} asks a hub that serves {self.world_size} ranks"
            )
            return Refused(BAD_VALUE, said, "give Rank and Consumer.serve_ranks the same world_size")
        if request.member > time.monotonic_ns():
            return Refused(
                BAD_VALUE,
                f"incarnation {request.member} is in the future",
                "share one clock: CLOCK_MONOTONIC",
            )
        if self._failed:
            return Refused(
                NO_MORE_BATCHES, f"no more batches are formed: {self._failed}", "see the consumer's log"
            )
        with self._change:
            if request.rank not in self._dead:  # a request of a dead rank may still wait here
                self._known.add(request.rank)  # it may die before the next check
            self._look_for_deaths()
            self._withdraw_stale()
            known = self._book.issued_steps
            share = (
                None
                if self._stop.is_set()
                else self._book.next_for(request.rank, request.member, request.after)
            )
            # count on issue, not when formed: a formed batch may be withdrawn; a feed counts its own
            if self._book.issued_steps > known and self._groups is not None:
                self._former.count_batch()
                self._former.count_lags(share.step.groups if share is not None else [])
            answer: Manifest | NoMoreShares | None = None
            if share is not None:
                header.fault(b"hub.share_issued")
                answer = self._manifest(share, request.rank)
            elif self._drained and not self._may_be_inherited():
                answer = NoMoreShares()
            self._note_asking(request.rank, answer is None and self._book.open_steps < self._steps_ahead)
            return answer

    def _note_asking(self, rank: int, waits: bool) -> None:
        """Shows observers whether any rank waits for a batch, rather than for other ranks."""
        before, self._asking = self._asking, (self._asking - self._dead) | {rank}
        if not waits:
            self._asking.discard(rank)
        if bool(before) != bool(self._asking):
            self._state.note_asking(bool(self._asking))

    def _may_be_inherited(self) -> bool:
        """Returns whether a share that another rank reads now may still come to this one."""
        return self._dead_rank == "spread" and self._book.open_steps > 0

    def shares_done(self, request: SharesDone) -> Ack | Refused:
        """Ends the leases that no rank needs any more; tells a feed of a failure, and blocks for its disk."""
        if request.epoch != self._state.hub_epoch:
            return self._other_epoch(request.epoch)
        header.fault(b"hub.share_done")
        with self._change:
            self._finish(self._book.done(request.rank, request.member, request.numbers))
            failed = self._book.failed(request.rank, request.member, request.failed)
        self._hub.look_again()  # for some ranks this may be the end
        for step, groups in failed:
            if step.failed is not None and groups:
                step.failed(groups)
        return Ack()

    def _other_epoch(self, epoch: int) -> Refused:
        said = f"that was a share of hub {epoch}, this is hub {self._state.hub_epoch}"
        return Refused(OTHER_EPOCH, said, "join again: what was not released is handed out again")

    def _finish(self, groups: list[Group]) -> None:
        for group in groups:
            for record in group.records:
                record.release()
        self._done += len(groups)
        if self._groups is not None:
            self._former.finished(groups)  # not for a feed, whose lock is held here: the screen takes it, too
        self._say_if_finished()
        self._change.notify_all()

    def _say_if_finished(self) -> None:
        if self._is_idle():
            self._state.say_finished()

    def _look_for_deaths(self) -> None:
        if time.monotonic() < self._looked_s + _LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        living = set(self._living())
        self._dead = (self._dead | self._known) - living
        for rank in sorted(self._known - living):
            waiting = sum(rank in share.readers for share in self._book)
            # One that left in order has no share, and may be gone for good: that is no trouble.
            level = logging.WARNING if waiting else logging.INFO
            log.log(level, "rank %d of bridge %r is gone; %d shares wait", rank, self._state.bridge, waiting)
        self._known = living
        if self._dead_rank == "spread" and living:
            for rank in {reader for share in self._book for reader in share.readers} & self._dead:
                self._finish(self._book.hand_over(rank, sorted(living)))

    def _withdraw_stale(self) -> None:
        """Withdraws batches that grew stale before any share was requested."""
        current = self._state.training_version
        groups = self._book.withdraw(
            lambda group: is_stale(group.oldest_version, current, self._max_staleness)
        )
        if groups:
            self._former.put_back(groups)
            self._withdrawn, self._drained = True, False
            self._change.notify_all()

    def _manifest(self, share: Share, rank: int) -> Manifest:
        lanes: dict[str, int] = {}
        groups = []
        for group in share.groups:
            places = []
            for record in group.records:
                lane = lanes.setdefault(lane_name(record), len(lanes))
                places.append(
                    RecordPlace(
                        lane, record._slot, record._generation, record._sequence, bool(record._redelivered)
                    )
                )
            groups.append(GroupPlaces(group.size, places))
        step = share.step
        return Manifest(
            epoch=self._state.hub_epoch,
            number=share.number,
            step=step.number,
            rank=rank,
            world_size=self.world_size,
            mode=self._book.mode,
            reissued=share.reissued,
            policy_version=step.policy_version,
            batch_groups=len(step.groups),
            batch_rows=step.rows,
            batch_tokens=step.tokens,
            lanes=list(lanes),
            groups=groups,
        )

    # -- state

    @property
    @then_close
    def idle(self) -> bool:
        """Whether the bridge is drained and every share is done."""
        with self._change:
            return self._is_idle()

    def _is_idle(self) -> bool:
        return self._drained and self._book.open_steps == 0

    @then_close
    def stats(self) -> dict[str, float]:
        """Counters, flat. Any thread."""
        with self._change:
            return {
                "ranks_live": len(self._living()),
                "ranks_steps_open": self._book.open_steps,
                "ranks_groups_done_total": self._done,
                "ranks_reissued_total": self._book.reissues,
            }

    @then_close
    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the bridge is drained and every share is done; then returns True.

        Returns False on timeout, or if no more can come: the consumer was closed, or a batch could not be
        formed (its log says why). Any thread.
        """
        deadline = deadline_of(timeout_s)
        with self._change:
            while not (self._is_idle() or self._failed or self._stop.is_set() or self._closing.ending):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                # Wake up regularly: a signal handler in this thread cannot notify the wait of a close.
                self._change.wait(min(left, _LOOK_EVERY_S))
            return self._is_idle()

    @then_close
    def settled(self, timeout_s: float) -> bool:
        """Waits until living ranks are done with what a feed has ended; returns whether they are."""
        deadline = deadline_of(timeout_s)
        with self._change:
            while any(share.step.ended for share in self._book):
                left, living = deadline - time.monotonic(), set(self._living())
                if left <= 0 or not any(share.step.ended and share.readers & living for share in self._book):
                    return False
                self._change.wait(min(left, _LOOK_EVERY_S))
            return True

    @then_close
    def described(self) -> str:
        """Returns its state in words, for a repr; never raises, also when closed."""
        with self._change:
            ended = self._closing.ending or self._stop.is_set()
            state = (
                "closed" if ended else "all done" if self._is_idle() else "drained" if self._drained else ""
            )
            if self._failed:
                state = f"failed: {self._failed}"
            return ", ".join(
                filter(
                    None,
                    (
                        f"{self.world_size} ranks",
                        self._book.mode,
                        f"{self._book.open_steps} steps open",
                        f"{self._done} groups done",
                        state,
                    ),
                )
            )

    def stop(self) -> None:
        """Ends the thread; shares dealt out stay held. For Consumer.close."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def forget(self) -> None:
        """Ends every lease without release: the next consumer gets those records. For Consumer.close."""
        with self._change:
            steps = {share.step.number: share.step for share in self._book}
            read = [group for step in steps.values() for group in step.read]
            for group in (*read, *(group for share in self._book for group in share.groups)):
                group.abandon()


class RankServer:
    """Batches are dealt out to learner ranks as long as this, or its consumer, is held. Any thread."""

    def __init__(self, dealer: ShareDealer, bridge: str, consumer: object) -> None:
        self._dealer, self._bridge, self._consumer = dealer, bridge, consumer

    def deal(self, groups: list[Group], failed: Callable[[list[Group]], None]) -> Callable[[], None]:
        """Deals a step out, for a feed: serve_ranks(groups=None). Never blocks; any thread.

        Returns what ends the step: from then on its groups are released, as soon as every rank is done with
        them.

        Args:
            groups: of the step, leased and unread; sharded ranks get none if there are too few.
            failed: is called with the groups of a share whose step a rank reports as failed, in a thread that
                answers messages: it must not wait for ranks.

        Raises BatchTooBig: more records than a message can name.
        """
        return self._dealer.deal(groups, failed)

    def drained(self) -> None:
        """Tells the ranks that `deal` has no further step for now. Never blocks; any thread."""
        self._dealer.drained()

    @property
    def world_size(self) -> int:
        """Ranks that are served."""
        return self._dealer.world_size

    @property
    def idle(self) -> bool:
        """Whether the bridge is drained and every share is done."""
        return self._dealer.idle

    def stats(self) -> dict[str, float]:
        """Returns counters, flat. Never blocks for long."""
        return self._dealer.stats()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the bridge is drained and every share is done; then returns True.

        Returns False on timeout, or if no more can come: the consumer was closed, or a batch could not be
        formed (its log says why).

        Args:
            timeout_s: seconds; None: for ever.
        """
        return self._dealer.wait(timeout_s)

    def settled(self, timeout_s: float) -> bool:
        """Returns whether the ranks are done with all steps that a feed has ended. Blocks for living ones."""
        return self._dealer.settled(timeout_s)

    def __repr__(self) -> str:
        return f"<RankServer of {self._bridge!r}: {self._dealer.described()}>"
