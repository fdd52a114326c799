"""A feed: what every trainer needs between a bridge and its steps.

    with Feed("run1", groups=8, run_dir="runs/run1") as feed:
        while training:
            step = feed.take()
            try:
                loss = ...                       # step.rows, or step.batch
            except Exception as error:
                feed.failed(step, error)         # its groups come again; the one at fault is set aside
            else:
                feed.trained(step, version=version)
            if checkpoint_is_due:
                state = feed.state_dict()        # into the checkpoint
                save(...)
                feed.checkpointed()

It opens the consumer, hands out one split, cuts what is too stale, names or leaves out rows that cannot be
trained, and releases groups when the step is durable. Knows no trainer, and needs numpy only.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import shmbridge
from shmbridge import Batch, BatchTooBig, Closed, ConsumerEmpty, Record, Run
from shmbridge.archive.set_aside import Failures
from shmbridge.config import check_version
from shmbridge.consumers.evaluations import FILE as EVALUATIONS
from shmbridge.consumers.evaluations import EvaluationLog
from shmbridge.consumers.feed.earlier_run import HeldRecords, Start, bridge_info, require_start, trained_as
from shmbridge.consumers.feed.settings import ReleaseAt, Unfit, check_words
from shmbridge.consumers.trajectories import (
    Credit,
    Trajectory,
    UnfitRow,
    lags,
    trajectories,
    unfit_row,
    unfit_rows,
)
from shmbridge.errors import Discard, counted
from shmbridge.hub import Held, Screen
from shmbridge.record import Group, abandon
from shmbridge.schema import Split

if TYPE_CHECKING:
    from shmbridge.batch import Layout, MakeBatch
    from shmbridge.control.messages import Evaluated
    from shmbridge.hub import DeadRank, Mode, RankServer

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # longest wait at a time at first, so the longest wait for close() or a cancelled call
_LONG_S = 1.0  # after which it waits longer at a time:
_ASK_S = 1.5  # longer than the second after which the consumer says that a batch does not fit into the lanes
_MOST_WAITING = 64  # tasks at a time, each with its own timeout; more wait for one of these
_MOST_ASIDE = 3  # in a row, without a step that trains: then it is not the groups that are at fault
_LAST_WORD_S = 5.0  # for ranks to say that they are done with what is trained
_FORMAT = 1
STATE = "shmbridge.json"
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
_NO_LAST_STEP = (1 << 31) - 1


class Drained(RuntimeError):
    """The bridge is drained or closed, and has fewer groups than a step wants; what is left stays there."""


# what `take` raises, and a full disk
_NOT_OF_GROUPS = (ConsumerEmpty, BatchTooBig, Closed, UnfitRow, Drained, OSError)


class _Unread(Batch):
    """Groups that ranks read in place; here nothing is gathered."""

    def __init__(self, groups: list[Group], layout: Layout) -> None:
        self.groups, self.layout, self._is_lent = groups, layout, False
        self.records = [record for group in groups for record in group.records]


class Step:
    """The groups of one step, leased until the feed releases them; made by `Feed.take`.

    Attributes:
        groups: whole groups, in order.
        batch: all their rows, a packed shmbridge.Batch.
        rows: those that can be trained, as `Trajectory`.
        unfit: the others.
        metrics: where the advantages come from, how stale the rows are, and how many were left out.
        early: the trainer's to set: it keeps the step until it is asked for, so that nothing waits for its
            end.
    """

    def __init__(self, groups: list[Group], feed: Feed, held: Held) -> None:
        self.groups, self._feed, self._held = groups, feed, held
        self.keys = [_key(group) for group in groups]
        self._early = False
        self._counted = True  # as a step of the run; parts are, once they are trained

    @property
    def early(self) -> bool:
        """See the class."""
        return self._early

    @early.setter
    def early(self, is_early: bool) -> None:
        self._early = is_early
        self._feed._begin(self)

    @cached_property
    def batch(self) -> Batch:
        """See the class. Its `release()` does nothing: the feed releases."""
        made = (self._feed.make or Batch)(self.groups, "packed")
        made._is_lent = True
        return made

    @cached_property
    def unfit(self) -> dict[int, tuple[str, str]]:
        """Rows that cannot be trained, by number: what kind of row, and why."""
        return unfit_rows(self.batch, self._feed._longest_row, self._feed._vocabulary)

    @cached_property
    def _read(self) -> tuple[list[Trajectory], dict[str, float]]:
        feed = self._feed
        rows, metrics = trajectories(
            self.batch, feed.credit, whole_rows=feed.whole_rows, mask_truncated=feed.mask_truncated
        )
        if lags := self.lags(feed.consumer.training_version):
            metrics |= {"staleness_mean": sum(lags) / len(lags), "staleness_max": float(max(lags))}
        metrics["rows_left_out"] = float(len(self.unfit))
        return [row for row in rows if row.row not in self.unfit], metrics

    @property
    def metrics(self) -> dict[str, float]:
        """See the class. The dictionary is the caller's to extend."""
        return self._read[1]

    @property
    def rows(self) -> list[Trajectory]:
        """See the class. Never blocks. Raises NoAdvantages."""
        return self._read[0]

    def lags(self, version: int) -> list[int]:
        """Returns how many versions each row is behind this one, of the rows that were stamped.

        Any thread, at any time.
        """
        records = [record for group in self.groups for record in group.records]
        return lags(
            (record.meta.min_policy_version for record in records for _ in range(record.rows)), version
        )

    def longest_row(self) -> tuple[int, str]:
        """Returns the tokens of its longest row, and the group and environment of that. Never blocks."""
        row = int(self.batch.lengths.argmax())
        meta = self.batch.meta[row]
        return int(self.batch.lengths[row]), f"group {meta.group_id} of environment {meta.env_name!r}"

    def __repr__(self) -> str:
        return f"<Step of {counted(len(self.groups), 'group')}, {counted(len(self.batch), 'row')}>"


class Feed:
    """A bridge's consumer and all that a trainer needs of one; a context manager.

    Calls block as they say. `take` and the calls about steps are for any thread; the rest for one.

    Args:
        bridge: its name; this process becomes its consumer.
        groups: groups of a step; or else
        rows: trajectories of a step, whole groups as far as they fit.
        release_at: "step" releases a step's groups when it is trained, "checkpoint" once a checkpoint with
            `state_dict()` in it is durable; None: "checkpoint" if `run` saves checkpoints, else "step". The
            choice is logged. Lanes must have room for what waits for a checkpoint: else BatchTooBig, or, with
            None, the held steps are released early, which is counted and warned of.
        max_staleness: groups that are more versions behind are discarded and counted; None: no limit.
        split: "train" or "eval": groups of the other are released and counted; None: both.
        set_aside_after: failures of a step after which its groups are tried in halves until the one at fault
            is found, which is written into `set_aside/` of `run_dir` and released; 0: never, a failure is
            raised.
        run: announced to the environments; None: a run without a last step.
        run_dir: folder of the run; None: `checkpoint_dir` of `run`, else runs/<bridge>.
        trained_together: groups that the trainer must have before it trains and releases any; None: `groups`.
        exact: every step has exactly as many groups as asked for: groups that are tried apart are joined by
            others, one set of them at a time. For trainers whose steps have a fixed size.
        unfit: "refuse" raises UnfitRow at a row that cannot be trained, "leave_out" leaves the row out of
            `step.rows` and counts it.
        longest_row: most tokens of a row; None: any number.
        vocabulary: token ids are below this; None: not checked.
        credit: how advantages are computed for groups without their own.
        start: what to do with a bridge that was trained before, if no state of its run is loaded: None
            refuses it, "from-bridge" goes on with its weights, which the trainer has loaded with
            `load_published`, "from-scratch" gives them up.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole; otherwise not at all.
        mask_truncated: nothing is trained of rows whose `finish_reason` is known and not "stop".
        make: makes a step's batch of its groups, in the thread that forms batches; None: shmbridge.Batch.
        prefetch: batches gathered ahead, still held.
        screen: as of Consumer.screen: groups for which it returns False are released and counted.
        consumer: further options of shmbridge.Consumer.

    Attributes:
        consumer: the shmbridge.Consumer, which is the feed's to take from and to close.

    Raises:
        ValueError: an argument is not one of the allowed values. As shmbridge.Consumer.
    """

    def __init__(
        self,
        bridge: str,
        *,
        groups: int | None = 8,
        rows: int | None = None,
        release_at: ReleaseAt | None = None,
        max_staleness: int | None = None,
        split: Split | None = "train",
        set_aside_after: int = 2,
        run: Run | None = None,
        run_dir: str | Path | None = None,
        trained_together: int | None = None,
        exact: bool = False,
        unfit: Unfit = "refuse",
        longest_row: int | None = None,
        vocabulary: int | None = None,
        credit: Credit | None = None,
        whole_rows: bool = False,
        mask_truncated: bool = False,
        start: Start | None = None,
        make: MakeBatch | None = None,
        prefetch: int = 0,
        screen: Screen | None = None,
        **consumer: Any,
    ) -> None:
        check_words(locals())
        if exact and rows is not None:
            raise ValueError("exact=True counts groups, and rows= does not -> groups=")
        saves = run is not None and run.save_checkpoint_interval > 0
        self.release_at: ReleaseAt = release_at or ("checkpoint" if saves else "step")
        self._strict = release_at is not None
        self.credit, self.whole_rows, self.make = credit or Credit(), whole_rows, make
        self.mask_truncated = mask_truncated
        self._groups, self._rows, self._exact = groups or 8, rows, exact
        self._together = trained_together or self._groups
        limited = consumer.get("max_off_policy_steps") is not None
        # with a limit the consumer hands out whole steps only
        self._at_once = consumer.get("groups_per_step") if limited else None
        # the consumer's own limit holds for groups that come again, too
        self._max_staleness = consumer.get("max_off_policy_steps") if max_staleness is None else max_staleness
        self._split, self._prefetch, self._pid = split, prefetch, os.getpid()
        self._after, self._on_unfit = set_aside_after, unfit
        self._longest_row, self._vocabulary, self._screen = longest_row, vocabulary, screen
        self.counts: Counter[str] = Counter()
        self._taking = threading.RLock()  # around what takes from the consumer, for up to _ASK_S
        self._taker = 0  # the thread that does
        self._lock = threading.RLock()  # around what is held; never for long
        self._batches: tuple[tuple[float, int | None], Iterator[Batch]] | None = None
        self._again: deque[list[Group]] = deque()  # groups that come as steps of their own, before all others
        self._gathered: list[Group] = []  # of an exact step that is not complete
        self._steps: dict[int, Step] = {}  # handed out, neither trained nor failed; by id
        self._trained: list[Held] = []  # steps that are not yet in a durable checkpoint
        self._saving: list[Held] | None = None  # trained before the last state_dict
        self._known = HeldRecords({}, {})  # of the loaded state
        self._aside_in_a_row, self._empty_s = 0, 0.0  # since when calls found no step
        self._asked = False  # whether groups have passed the screen
        self._closing = threading.Event()
        self._bridge, self._start = bridge, start
        self._found = trained_as(bridge_info(bridge))  # before this process publishes anything
        self._run_id: str | None = None  # of the loaded state
        self._closes_late = self._may_start = self._is_broken = self._begun = False
        self._saved = False  # all that is trained
        self._run_ended = False  # in the bridge
        run = run or Run(batch_size=rows or 8 * (groups or 8), max_token_len=0, num_steps=_NO_LAST_STEP)
        folder = Path(run_dir or run.checkpoint_dir or Path("runs") / bridge) / "set_aside"
        self._evaluations = EvaluationLog(folder.with_name(EVALUATIONS))
        self.consumer = shmbridge.Consumer(bridge, run, **consumer)
        try:
            self._failures = Failures(folder, set_aside_after) if set_aside_after else None
        except BaseException:
            self.consumer.close()
            raise
        self.consumer.screen(self._is_new)
        self._thread: ThreadPoolExecutor | None = None
        self._server: RankServer | None = None
        self._told: set[str] = set()  # groups whose failure at ranks is counted
        self._deal: Callable[[list[Group]], Callable[[], None]] | None = None  # with a server
        log.info(
            "bridge %r: groups are released when %s (release_at=%r)",
            bridge,
            "their step is trained"
            if self.release_at == "step"
            else "a checkpoint with their step is durable",
            self.release_at,
        )

    # -- how it starts

    def begin_run(self, version: int) -> int:
        """Announces the version of the weights with which training starts, and returns it: the next free one
        if the bridge is above, as after a kill between two checkpoints. Call it before the first step.

        Until the feed is closed in order, or a checkpoint has all that is trained, the bridge then keeps what
        is published for the next trainer. Never blocks.

        Raises BridgeAhead as `take`.
        """
        self.require_start()
        if version < self.consumer.policy_version:
            version = self.consumer.policy_version + 1
        goes_on = self._run_id is not None or self._start == "from-bridge"
        self._run_id = self._run_id or (self._found[0] if goes_on else "") or secrets.token_hex(8)
        self.consumer.publish_policy_version(
            version, run_id=self._run_id, same_as=self._found[1] if goes_on else None
        )
        self._begun = True
        return version

    def require_start(self) -> None:
        """Raises BridgeAhead as `take`, for a trainer that is about to publish weights. Never blocks."""
        if not self._may_start:
            require_start(self._bridge, self._found, self._start, self._run_id)
            self._may_start = True

    def serve_ranks(
        self, world_size: int, mode: Mode = "sharded", dead_rank: DeadRank = "wait"
    ) -> RankServer:
        """Makes `take` deal each step out to `world_size` learner ranks (shmbridge.Rank), as it returns it.

        As without ranks, `trained`, `dropped` and `checkpointed` in this process release a step's groups, but
        not before every rank is done with them. A rank whose step fails calls `report_failed` before it ends.
        Rows are the ranks' to judge: `unfit`, `longest_row` and `vocabulary`
        are not looked at. Without `exact` a step of groups tried apart may leave ranks without any. Never
        blocks; call it once, before the first `take`.

        Args:
            world_size, mode, dead_rank: as of Consumer.serve_ranks.
        """
        self._server = self.consumer.serve_ranks(world_size, None, mode, dead_rank=dead_rank)
        self._deal = functools.partial(self._server.deal, failed=self._failed_at_ranks)
        return self._server

    def _failed_at_ranks(self, groups: list[Group]) -> None:
        """Counts a failure of groups that ranks read, which stay out until this process ends."""
        with self._lock:
            keys = [key for key in map(_key, groups) if key not in self._told]  # several ranks may report
            for step in self._steps.values():
                if set(keys) & set(step.keys):
                    self.counts["steps_failed"] += not self._told & set(step.keys)
                    step.early = True  # so that the end of this process does not count, too
            self._told |= set(keys)
            if self._failures is not None and keys:
                self._failures.failed(keys)

    # -- taking

    def take(self, timeout_s: float | None = None, *, groups: int | None = None) -> Step:
        """Returns the next step, leased. Blocks at most `timeout_s` seconds (None: for ever); any thread.

        After 5 s the log says what it waits for, then every minute.

        Args:
            timeout_s: seconds to wait.
            groups: groups of this step, instead of the feed's number.

        Raises:
            ConsumerEmpty: no step in time. Drained: none comes any more.
            BatchTooBig: the lanes are full of groups that are held, so none can come.
            UnfitRow: under unfit="refuse". Its group comes again, and is set aside as one whose step failed.
            BridgeAhead: the bridge was trained before, and neither a state of its run nor `start` says how to
                go on.
        """
        return self._take(timeout_s, groups, threading.Event())

    async def take_async(self, timeout_s: float | None = None, *, groups: int | None = None) -> Step:
        """`take` that never blocks the event loop: a thread of the feed's waits. For one loop.

        If the task is cancelled, the groups come again, unread. ValueError: it serves ranks.
        """
        if self._closing.is_set():
            raise self._is_closed()
        if self._server is not None:
            raise ValueError(
                "what is dealt out to ranks cannot be taken back if a task is cancelled -> take()"
            )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                _MOST_WAITING, thread_name_prefix=f"shmbridge-{self.consumer.bridge}"
            )
        over = threading.Event()
        call = asyncio.get_running_loop().run_in_executor(
            self._thread, functools.partial(self._take, timeout_s, groups, over)
        )
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            over.set()
            call.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, call: asyncio.Future[Step]) -> None:
        if not call.cancelled() and call.exception() is None:
            self.give_back(call.result())

    def _take(self, timeout_s: float | None, groups: int | None, over: threading.Event) -> Step:
        self.require_start()
        try:
            return self._wait_for_step(timeout_s, groups, over)
        finally:
            if self._closes_late:
                self._closes_late = False
                self.close()

    def _wait_for_step(self, timeout_s: float | None, groups: int | None, over: threading.Event) -> Step:
        began_s = time.monotonic()
        with self.consumer.one_wait():
            while not (over.is_set() or self._closing.is_set()):
                waited_s = time.monotonic() - began_s
                left_s = math.inf if timeout_s is None else timeout_s - waited_s
                look_s = _LOOK_S if waited_s < _LONG_S else _ASK_S
                wait_s, step = max(0.0, min(look_s, left_s)), None
                try:
                    if self._taking.acquire(timeout=wait_s):
                        self._taker = threading.get_ident()
                        step = self._next(wait_s, groups)
                finally:
                    if self._taker == threading.get_ident():
                        self._taker = 0
                    with suppress(RuntimeError):  # not taken
                        self._taking.release()
                if step is not None:
                    if over.is_set() or self._closes_late:  # nobody else gives it back
                        self.give_back(step)
                        break
                    self._empty_s = 0.0
                    return step
                if left_s <= look_s:
                    self._look_for_room(groups)
                    raise ConsumerEmpty(f"no step within {timeout_s:g} s: {self._missing(groups)}")
        raise self._is_closed()

    def _is_closed(self) -> Drained:
        return Drained(f"the feed of bridge {self.consumer.bridge!r} is closed")

    def _next(self, wait_s: float, groups: int | None) -> Step | None:
        """Returns the next step; None if there is none in time. Blocks."""
        wanted = groups or self._groups
        while True:
            if made := self._gather_again(wanted) if self._exact else self._next_again():
                return self._step_of(made)
            missing = (self._at_once or wanted - len(self._gathered)) if self._exact else groups
            if (batch := self._fresh(wait_s, missing)) is None:
                return None
            parts = self._by_failures(batch.groups)
            whole = not self._exact or (not self._gathered and len(batch.groups) == wanted)
            if len(parts) == 1 and whole and not self._must_wait(batch.groups):
                return self._step_of(batch.groups, batch)
            batch.records = []
            with self._lock:
                self._again.extend(parts)

    def _gather_again(self, wanted: int) -> list[Group] | None:
        """Returns that many groups of those that come again; None if there are fewer, which are kept."""
        with self._lock:
            if self._gathered:  # looked at again: they may have become stale
                self._again.appendleft(self._gathered)
                self._gathered = []
        while len(self._gathered) < wanted and (again := self._next_again()):
            room = wanted - len(self._gathered)
            self._gathered += again[:room]
            if again[room:]:
                self._again.appendleft(again[room:])
        if len(self._gathered) < wanted:
            return None
        made, self._gathered = self._gathered[:wanted], self._gathered[wanted:]
        return made

    def _fresh(self, wait_s: float, groups: int | None) -> Batch | None:
        """Returns the consumer's next batch; None if there is none in time. Blocks."""
        if self._batches is None or self._batches[0] != (wait_s, groups):
            self._batches = None  # ends it: what it gathered ahead comes first
            self._asked = True
            begun = self.consumer.batches(
                groups or self._groups,
                rows=self._rows if groups is None else None,
                max_staleness=self._max_staleness,
                split=self._split,
                make=self.make if self._server is None else _Unread,
                # a thread would find nothing in time
                prefetch=self._prefetch if wait_s >= _LOOK_S and self._server is None else 0,
                hold="caller",
                timeout_s=wait_s,
            )
            self._batches = ((wait_s, groups), iter(begun))
        try:
            batch = next(self._batches[1], None)
        except BaseException as wrong:
            self._batches = None  # an iteration that raised is over
            if isinstance(wrong, ConsumerEmpty):
                return None
            if isinstance(wrong, BatchTooBig):
                self._when_full(wrong)
                return None
            raise
        if batch is None:
            self._batches = None
            if self._server is not None:
                self._server.drained()
                self._server.wait(wait_s)  # a rank that is done may be about to report it
            raise Drained(
                f"bridge {self.consumer.bridge!r} is drained: {self._missing(groups)} -> save the model; a "
                "new run needs a bridge that is not drained"
            )
        self.consumer.queue.count_batch(-1)  # a step is counted as it is handed out
        return batch

    def _when_full(self, full: BatchTooBig) -> None:
        """Returns if the lanes will have room, or have it now; else raises BatchTooBig."""
        out = self._groups_out()
        if out >= self._together or self._saving:  # a whole step is trained, or saved: then released
            return None
        if self._trained and not self._strict:
            return self._release_early(full)
        what, hint = (
            f"{full.message}; the trainer has {out} of the {self._together} groups of a step",
            full.hint,
        )
        if self._trained:
            what = f"{what}, and {counted(len(self._trained), 'step')} wait for a checkpoint"
            hint = "save more often, give environments larger lanes, or release groups at each step"
        raise BatchTooBig(what, hint=hint) from None

    def _look_for_room(self, groups: int | None) -> None:
        """Does what a longer wait would do if the lanes are full, after calls too short to notice."""
        now = time.monotonic()
        self._empty_s = self._empty_s or now
        if now - self._empty_s >= _LONG_S and self._rows is None:
            try:
                self.consumer.queue.require_room(groups or self._groups)
            except BatchTooBig as full:
                self._when_full(full)

    def _release_early(self, full: BatchTooBig) -> None:
        """Releases what waits for a checkpoint, since the lanes have no room for more."""
        with self._lock:
            early = self._trained
            _release(early)
            self._trained, self._saving = [], None
        first = "steps_released_early" not in self.counts
        self.counts["steps_released_early"] += len(early)
        log.log(
            logging.WARNING if first else logging.INFO,
            "bridge %r: %d steps are released before a checkpoint has them, since the lanes are full; if the "
            "trainer is killed before it saves, they are lost to the model: %s -> save more often, or larger "
            "lanes; %s",
            self._bridge,
            len(early),
            full.message,
            full.hint,
        )

    def _groups_out(self) -> int:
        with self._lock:
            return sum(len(step.groups) for step in self._steps.values() if not step.early)

    def _next_again(self) -> list[Group] | None:
        """Returns the first groups that come again and may go into a step now; discards the stale ones."""
        most, failures = self._max_staleness, self._failures
        with self._lock:
            waiting, self._again = self._again, deque()
            while waiting:
                groups, version = waiting.popleft(), self.consumer.training_version
                if self._must_wait(groups):
                    self._again.append(groups)
                    continue
                stale = [g for g in groups if most is not None and 0 <= g.oldest_version < version - most]
                for group in stale:
                    group.discard(Discard.STALE)
                if stale and failures is not None:
                    failures.trained(map(_key, stale))
                groups = [group for group in groups if group not in stale]
                if self._is_at_fault(groups):
                    try:
                        self._set_aside(groups[0], "its step failed before")
                    except BaseException:
                        self._again.extend(waiting)
                        raise
                elif groups:
                    self._again.extend(waiting)
                    return groups
        return None

    def _must_wait(self, groups: list[Group]) -> bool:
        """Returns whether a step has groups of another set that is tried apart."""
        if self._failures is None or not self._failures.counts:
            return False
        with self._lock:
            begun = (step for step in self._steps.values() if not step.early)
            out = [*self._gathered, *(group for step in begun for group in step.groups)]
        these, others = (
            {self._failures.set_of(_key(group)) for group in some} - {None} for some in (groups, out)
        )
        return bool(these and others - these)

    def _is_at_fault(self, groups: list[Group]) -> bool:
        return self._failures is not None and len(groups) == 1 and self._failures.is_at_fault(_key(groups[0]))

    def _by_failures(self, groups: list[Group]) -> list[list[Group]]:
        """Returns the groups as steps: one at fault alone, those not suspected, then sets to try apart."""
        if self._failures is None or not self._failures.counts:
            return [groups]
        known = {_key(group): group for group in groups}
        return [[known[key] for key in part] for part in self._failures.apart(list(known))]

    def _step_of(self, groups: list[Group], batch: Batch | None = None) -> Step:
        """Begins a step. A batch is of these groups, and gives its leases up."""
        held = self.consumer.queue.keep([record for group in groups for record in group.records], batch)
        step = Step(groups, self, held)
        if batch is not None and self._deal is None:
            step.batch = batch
        self.consumer.queue.count_batch()
        try:
            unfit = step.unfit if self._deal is None else {}
        except BaseException:  # as where memory for its arrays ran out
            self.consumer.queue.count_batch(-1)
            self._again.appendleft(groups)
            raise
        if unfit and self._on_unfit == "refuse":
            self._refuse(step, *next(iter(unfit.items())))
        with self._lock:
            self._steps[id(step)] = step
            if self._failures is not None:
                self._failures.begin(step.keys)
            redelivered = sum(group.records[0].meta.redelivered for group in groups)
            self.counts.update({"groups": len(groups), "groups_redelivered": redelivered})
            for kind, _ in unfit.values():
                self.counts[f"rows_left_out_{kind}"] += 1
        if self._deal is not None:  # last: interrupted, the step stays out, and comes to the next process
            try:
                held.end = self._deal(groups)
            except Exception:
                self.give_back(step)
                raise
        return step

    def _begin(self, step: Step) -> None:
        """Notes whether the end of the process would be one of this step; never, as long as it is early."""
        with self._lock:
            if self._failures is not None and id(step) in self._steps:
                (self._failures.over if step.early else self._failures.begin)(step.keys)

    def parts(self, step: Step) -> list[Step]:
        """Returns a step per group in place of the step, for a trainer that trains groups one by one.

        Each is to be ended by itself, or several together, which then count as one step of the run. Never
        blocks; any thread. Raises ValueError: ranks read it.
        """
        self._require_here(step)
        self._end([step], begun=True)
        self._uncount([step])
        made = [Step([group], self, self.consumer.queue.keep(list(group.records))) for group in step.groups]
        for each in made:
            each._counted = False
        with self._lock:
            self._steps.update((id(each), each) for each in made)
        return made

    def _missing(self, groups: int | None) -> str:
        by_rows = groups is None and self._rows is not None
        of = f"{self._rows} rows" if by_rows else counted(groups or self._groups, "group")
        stats, there = self.consumer.stats(), self.consumer.queue.groups()
        live, dead = int(stats["lanes_live"]), int(stats["lanes_dead"])
        return f"{there} groups are there for a step of {of}; {live} of {live + dead} lanes have a producer"

    # -- rows that cannot be trained

    def _refuse(self, step: Step, row: int, unfit: tuple[str, str]) -> NoReturn:
        """Returns the step's groups, but for one that was refused too often; raises UnfitRow."""
        error, bad = unfit_row(step.batch, row, unfit), step.groups[int(step.batch.group_index[row])]
        self.consumer.queue.count_batch(-1)
        with self._lock:
            aside = self._failures is not None and self._failures.failed([_key(bad)]) is not None
            if back := [group for group in step.groups if not (aside and group is bad)]:
                self._again.appendleft(back)
            if aside:
                self._set_aside(bad, error)
        raise error

    # -- what became of a step

    def trained(self, step: Step | Sequence[Step], version: int | None = None) -> None:
        """Notes that a step is trained; releases its groups, or holds them for a checkpoint. Any thread.

        Never blocks for records.

        Args:
            step: of `take`, once; or several `parts` that were trained together.
            version: of the weights that the step made; published to the environments. None: not published.

        Raises ValueError, and nothing is noted: the step is over, or the version is below the published one.
        """
        over = self._that_are_out(step)
        if version is not None and check_version("version", version) < (now := self.consumer.policy_version):
            raise ValueError(f"version={version} is below {now}, which is published -> versions only rise")
        self._aside_in_a_row, self._saved = 0, False
        self.counts["steps_trained"] += 1
        if over and not any(each._counted for each in over):
            self.consumer.queue.count_batch()
        with self._lock:  # in this order: interrupted, they are in the next state
            if self.release_at == "checkpoint":
                self._trained += [each._held for each in over]
            self._end(over, trained=True)
        if self.release_at == "step":
            _release(over)
        if version is not None:
            self.publish(version)
        self._evaluations.note(self.consumer.take_evaluations())

    def publish(self, version: int) -> None:
        """Publishes the version of the weights that the trained steps made. Never blocks; any thread.

        For a trainer that publishes later than `trained`.
        """
        again = self._run_ended and not self._saved  # a checkpoint has steps before, and not the last ones
        self._run_ended = self._run_ended and not again
        self.consumer.publish_policy_version(
            version, run_id=self._run_id if again else None, same_as=version if again else None
        )

    def dropped(self, step: Step | Sequence[Step], why: str) -> None:
        """Releases groups that the trainer will not train, counted as `groups_dropped{why}`. Any thread."""
        over = self._end(step, trained=True)
        self.counts[f"groups_dropped{{{why}}}"] += sum(len(each.groups) for each in over)
        _release(over)

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """Releases what a checkpoint contains. Call it once that is durable. Never blocks; any thread.

        Args:
            state: the `state_dict()` in it. None: of the last call, or, without any, all that is trained.
                Give it where the next checkpoint may begin before this one is durable.
        """
        self._check_process()
        with self._lock:
            if state is not None:
                contained = {(name, number) for name, numbers in state["held"].items() for number in numbers}
                over = [step for step in self._trained if contained.issuperset(map(_place, step.records))]
                self._saving = [step for step in self._saving or () if step not in over] or None
            else:
                over, self._saving = (self._trained if self._saving is None else self._saving), None
            # what a rank or a view still keeps is not released yet: the next states list it, too
            self._known |= HeldRecords.of(_place(record) for step in over for record in step.records)
            _release(over)  # before the next line: interrupted, they are still listed in the next state
            self._trained = [step for step in self._trained if step not in over]
            if not self._trained:
                self._end_run()

    def _end_run(self) -> None:
        """Tells the bridge that the trainer has saved what it trained."""
        if self._begun and not self._saved:
            self.consumer.end_run()
            self._saved = self._run_ended = True

    def failed(self, step: Step | Sequence[Step], error: BaseException) -> None:
        """Notes that a step failed: its groups come again with the next `take`, or are set aside.

        Blocks for the disk. Raises `error` with set_aside_after=0, if memory ran out (a smaller step is the
        trainer's to make), if several groups were set aside in a row without a step that trains, since then
        they are not at fault, and if ranks read the step: it comes to the next process.
        """
        no_memory = lacks_memory(error)
        spared = no_memory or not isinstance(error, Exception) or lost_peer(error)
        over = self._that_are_out(step)
        if any(each._held.end is not None for each in over):
            if not spared:
                self._failed_at_ranks([group for each in over for group in each.groups])
            raise error
        self._uncount(self._end(over))
        self.counts["steps_failed"] += 1
        groups = [group for each in over for group in each.groups]
        with self._lock:
            fault = None
            if not (spared or self._failures is None):
                fault = self._failures.failed([_key(group) for group in groups])
            back = [group for group in groups if _key(group) != fault]
            most = max(self._groups, *(len(each.groups) for each in over))  # several steps stay several
            parts = self._by_failures(back) if back else []
            cut = [part[at : at + most] for part in parts for at in range(0, len(part), most)]
            self._again.extendleft(reversed(cut))
            for group in groups:
                if group not in back:
                    try:
                        self._set_aside(group, error)
                    except OSError as wrong:
                        raise wrong from error
        if no_memory:
            length, row = max(each.longest_row() for each in over)
            error.add_note(f"the longest row of the step has {length} tokens: {row}")
        if self._aside_in_a_row >= _MOST_ASIDE:
            error.add_note(
                f"{self._aside_in_a_row} groups in a row were set aside and no step was trained between: the "
                "groups are not at fault"
            )
        if no_memory or self._failures is None or self._aside_in_a_row >= _MOST_ASIDE:
            raise error

    def give_back(self, step: Step) -> None:
        """Returns an unread step: it comes again before all others, and nothing is counted. Any thread.

        Raises ValueError: ranks read it.
        """
        self._require_here(step)
        self._uncount(self._end(step))
        with self._lock:
            self._again.appendleft(step.groups)

    def _uncount(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if step._counted:
                self.consumer.queue.count_batch(-1)

    def _require_here(self, step: Step) -> None:
        if step._held.end is not None:
            raise ValueError(f"{step!r} is dealt out to ranks, which may be reading it")

    def _that_are_out(self, step: Step | Sequence[Step]) -> list[Step]:
        self._check_process()
        steps = [step] if isinstance(step, Step) else list(dict.fromkeys(step))
        with self._lock:
            for each in steps:
                if id(each) not in self._steps:
                    raise ValueError(f"{each!r} is over, or another feed's")
        return steps

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise Closed(f"the feed of bridge {self.consumer.bridge!r} belongs to the process before fork")

    def _end(self, step: Step | Sequence[Step], *, trained: bool = False, begun: bool = False) -> list[Step]:
        """Ends steps, and returns them; `begun`: their groups stay begun."""
        with self._lock:
            over = self._that_are_out(step)
            for each in over:
                del self._steps[id(each)]
            if self._failures is not None and not begun:
                keys = [key for each in over for key in each.keys]
                (self._failures.trained if trained else self._failures.over)(keys)
        return over

    def _set_aside(self, group: Group, why: object, *, is_mine: bool = True) -> None:
        assert self._failures is not None
        try:
            self._failures.set_aside(_key(group), group.records)
        except BaseException:
            if is_mine:  # else it stays with the consumer
                self._again.appendleft([group])
            raise
        for record in group.records:
            record.release()
        self._aside_in_a_row += 1
        self.counts["groups_set_aside"] += 1
        log.error(
            "group %s of %s is set aside in %s after %d failures of its step: %s",
            group.group_id,
            group.producer_id,
            self._failures.folder,
            self._after,
            repr(why) if isinstance(why, BaseException) else why,
        )

    # -- what a checkpoint contains

    def _is_new(self, group: Group) -> bool:
        """The consumer's screen: keeps out groups that the loaded state contains, and the trainer's; those
        known to be at fault are set aside.
        """
        known = all(self._known.contains(record.meta) for record in group.records)
        self.counts["groups_in_checkpoint"] += known
        if not known and self._is_at_fault([group]):
            with self._lock:
                self._set_aside(group, "its step failed before", is_mine=False)
            return False
        return not known and (self._screen is None or self._screen(group))

    def state_dict(self) -> dict[str, Any]:
        """Returns the records that are trained and not released, for a checkpoint. Never blocks.

        They are few: the steps since the last checkpoint, and those of the loaded state that may come again.
        Until `checkpointed`, a full lane is waited for: it will have room then.
        """
        with self._lock:
            self._saving = list(self._trained)
            self._known = self._known.that_may_come_again()
            held = HeldRecords(self._known.held, self._known.mounts)
            held |= HeldRecords.of(_place(record) for step in self._saving for record in step.records)
        return self._state(held)

    def state_of(self, step: Step) -> dict[str, Any]:
        """Returns a state with this step alone, for a process that joins them in its checkpoint."""
        return self._state(HeldRecords.of(_place(record) for record in step._held.records))

    def _state(self, records: HeldRecords) -> dict[str, Any]:
        return {"format": _FORMAT, "run_id": self._run_id or "", **records.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint: what it contains is released and counted when it comes, not trained.

        Call it before the first `take`. Raises ValueError: not made by `state_dict`, or `take` was called.
        """
        if self._asked:
            raise ValueError("groups were taken already: load the state before the first take()")
        try:
            if state["format"] != _FORMAT:
                raise ValueError
            self._known, self._run_id = HeldRecords(state["held"], state["mounts"]), str(state["run_id"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise ValueError(f"not a Feed state of format {_FORMAT}: {str(state)[:80]}") from None

    def save_state(self, folder: str | Path) -> dict[str, Any]:
        """Writes `state_dict()` into a checkpoint's folder, as shmbridge.json, and returns it.

        Blocks for the disk.
        """
        state, file = self.state_dict(), Path(folder) / STATE
        try:
            with file.with_suffix(".new").open("w") as new:
                json.dump(state, new)
                new.flush()
                os.fsync(new.fileno())
            Path(new.name).replace(file)
        except BaseException:
            self.not_saved()
            raise
        return state

    def not_saved(self) -> None:
        """Notes that the checkpoint of the last `state_dict` failed: its steps wait for the next one."""
        with self._lock:
            self._saving = None

    def load_state(self, folder: str | Path) -> bool:
        """Loads what `save_state` wrote; returns False if the folder has no such file. Blocks for the disk.

        Raises ValueError as `load_state_dict`; OSError: the file cannot be read.
        """
        try:
            state = json.loads((Path(folder) / STATE).read_bytes())
        except FileNotFoundError:
            return False
        self.load_state_dict(state)
        return True

    # -- evaluations

    def take_evaluations(self) -> list[Evaluated]:
        """Returns what environments measured in evaluations of their own since the last call, in order.

        Each is also a line in `evaluations.jsonl` of `run_dir`, which `trained` writes, too; the newest 256
        are kept for this call. `shmbridge.consumers.evaluations.evaluation_metrics` makes metrics of them.
        Blocks for the disk; any thread.
        """
        self._evaluations.note(self.consumer.take_evaluations())
        return self._evaluations.take()

    # -- counters and the end

    def stats(self) -> dict[str, float]:
        """Returns the feed's counters, `feed_..._total`, what it holds, and the consumer's. Never blocks."""
        with self._lock:
            held = {
                "feed_steps_out": float(len(self._steps)),
                "feed_steps_trained_held": float(len(self._trained)),
                "feed_evaluations_unwritten_total": float(self._evaluations.unwritten),
            }
        names = [(name.partition("{"), count) for name, count in dict.copy(self.counts).items()]
        mine = {f"feed_{name}_total{by}{what}": float(count) for (name, by, what), count in names}
        return {**self.consumer.stats(), **mine, **held}

    def rest(self) -> None:
        """Gathers nothing ahead until the next `take`; what it had gathered comes first. Blocks for a `take`
        under way.
        """
        with self._taking:
            self._batches = None

    def drain(self) -> None:
        """Takes no new records; `take` raises Drained after those already there."""
        self.consumer.drain()

    def close(self) -> None:
        """Closes the bridge. What is not released comes to the next consumer. Idempotent.

        Blocks for a `take` under way in another thread, at most a second or two, and five for living ranks to
        report that they are done with trained groups. In a signal handler that
        interrupts a `take`, this one closes as it ends, with Drained. Does nothing in a child of fork.
        """
        if self._pid != os.getpid():
            return
        self._closing.set()
        if self._taker == threading.get_ident():  # in a signal handler: the call that it interrupted closes
            self._closes_late = True
            return
        server, self._server = self._server, None  # a second close() does not wait
        if server is not None and not self._is_broken and not server.settled(_LAST_WORD_S):
            log.warning(
                "bridge %r: ranks did not say within %g s that they are done with trained groups, which "
                "therefore come to the next trainer, too",
                self._bridge,
                _LAST_WORD_S,
            )
        if self._thread is not None:
            self._thread.shutdown()
        with self._taking, self._lock:
            self._batches = None
            for groups in self._again:
                for group in groups:
                    group.abandon()
            self._again.clear()
            abandon([record for group in self._gathered for record in group.records])
            for held in (*(step._held for step in self._steps.values()), *self._trained):
                abandon(held.records)
            self._gathered.clear()
            if not (self._is_broken or (self._trained and self.release_at == "checkpoint")):
                self._end_run()
            self._begun = False  # a second close() has nothing to say
            self._steps.clear()
            self._trained.clear()
        if self._failures is not None:
            self._failures.close()
        self._evaluations.note(self.consumer.take_evaluations())
        self.consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; an exception counts as a failure of the steps that are not over, as `failed` does, unless
        it says that no group is at fault: see `blames_groups`.
        """
        self._is_broken = not (error is None or isinstance(error, Drained))
        if self._pid == os.getpid() and self._failures is not None and blames_groups(error):
            with self._lock:
                if keys := [key for step in self._steps.values() if not step.early for key in step.keys]:
                    self._failures.failed(keys)
        self.close()


def blames_groups(error: BaseException | None) -> bool:
    """Returns whether the groups of a step may be at fault for an error that ended it: not for an interrupt,
    what `take` raises, a full disk, memory that ran out, or another process that is gone.
    """
    if not isinstance(error, Exception) or isinstance(error, _NOT_OF_GROUPS):
        return False
    return not (lacks_memory(error) or lost_peer(error))


def lost_peer(error: BaseException) -> bool:
    """Returns whether an error means that a collective lost another process."""
    # by name: torch's, which is not imported; Gloo raises plain RuntimeErrors with its file names
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return "gloo" in text or "nccl" in text or any(each.__name__ == "DistError" for each in type(error).mro())


def lacks_memory(error: BaseException) -> bool:
    """Returns whether an error means that a device or the host is out of memory."""
    # by name: torch's, which is not imported, and Ray's copy of it, a class made of two
    if any(each.__name__ in ("MemoryError", "OutOfMemoryError") for each in type(error).mro()):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY)


def _release(steps: Iterable[Step | Held]) -> None:
    for each in steps:
        (each._held if isinstance(each, Step) else each).release()


def _key(group: Group) -> str:
    """Returns what names a group for ever, in every process."""
    return f"{group.producer_id} {group.records[0]._sequence}"


def _place(record: Record) -> tuple[str, int]:
    return record.meta.producer_id, record.meta.sequence
