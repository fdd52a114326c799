"""The hub's side of learner ranks: deals shares out, and keeps their leases until all are read.

It forms batches ahead, in a thread, or deals out those that a feed gives it, which ends them.

Locks show which ranks live; share_book.py assigns groups to ranks. The other side is rank.py. Why a rank's
memory does not change while it reads, even when a hub or a rank dies: docs/adr/0002-ranks.md.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from shmbridge._ext import header
from shmbridge.batching.former import BatchFormer
from shmbridge.batching.request import BatchRequest
from shmbridge.batching.staleness import is_stale
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
from shmbridge.hub.control_plane import ControlPlane
from shmbridge.hub.state import HubState
from shmbridge.ranks.share_book import Mode, Share, ShareBook, Step
from shmbridge.record.groups import Group
from shmbridge.record.leases import lane_name
from shmbridge.schema import Split
from shmbridge.segments import locks
from shmbridge.segments.closing import Closing, then_close
from shmbridge.segments.helper_threads import Joined
from shmbridge.segments.locks import MOST_RANKS, LockByte

_MOST_RECORDS = 30_000  # of one share: messages.MAX_MESSAGE_BYTES at 34 bytes a record
_LOOK_EVERY_S = 0.2

log = logging.getLogger(__name__)

DeadRank = Literal["wait", "spread"]


class ShareDealer:
    """Deals batches out to learner ranks. Its users hold a RankServer.

    With `groups` it forms the batches itself, in a separate thread; else it deals what `deal` gets.
    """

    def __init__(
        self,
        former: BatchFormer,
        state: HubState,
        control_plane: ControlPlane,
        closing: Closing,
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
            BatchRequest(former.want(groups, None), split=split)  # checks them
        if mode == "sharded" and groups is not None and groups < world_size:
            raise BadArgument(
                f"groups={groups}: each of {world_size} ranks needs one of every batch",
                hint=f'groups={world_size} or more, or mode="broadcast"',
            )
        self.world_size = world_size
        self._former, self._state, self._control_plane, self._closing = former, state, control_plane, closing
        self._groups, self._split, self._dead_rank = groups, split, dead_rank
        # a feed has cut what is stale, and deals what is wanted now
        self._max_staleness = None if groups is None else former.most_stale(max_staleness)
        self._steps_ahead = 0 if groups is None else 1 + prefetch
        self._book = ShareBook(world_size, mode)
        self._known: set[int] = set()  # ranks that were alive at the last check, or have asked since
        self._dead: set[int] = set()  # ranks that have died
        self._asking: set[int] = set()  # ranks that wait for a batch which is not formed yet
        self._done = 0
        self._looked_s = 0.0
        self._drained, self._withdrawn, self._failed = False, False, ""
        self._stop = threading.Event()
        self._change = threading.Condition(closing.lock())
        self._thread = None if groups is None else Joined(self._run, f"shmbridge-ranks-{state.bridge}")
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
        self._control_plane.look_again()
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
        self._control_plane.look_again()

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
            self._control_plane.look_again()

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
            self._control_plane.look_again()
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
        return [rank for rank in range(self.world_size) if locks.is_locked(fd, LockByte.FIRST_RANK + rank)]

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
        self._control_plane.look_again()  # for some ranks this may be the end
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
