"""Where a learner's batches come from: a feed in one process, shares of rank 0's feed with several ranks.

With several ranks none may decide alone: one that gave up, was stopped or found the bridge drained would
leave the others blocked in a collective. So each waits for its share for a short time, then all exchange
their status, until all can continue or leave together.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import shmbridge
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.feed import Drained, Feed, Step, blames_groups
from shmbridge.consumers.learner import Refusal
from shmbridge.consumers.learner.config.options import LearnerConfig, WaitingConfig
from shmbridge.consumers.learner.stopping import Stopped, StopSignals
from shmbridge.consumers.learner.world import PeerFailed, World, device_kind, say
from shmbridge.control.messages import Evaluated
from shmbridge.errors import counted
from shmbridge.hub import RankShare

if TYPE_CHECKING:
    from shmbridge.archive.recorder import Recorder
    from shmbridge.consumers.device_batch import DeviceCopies

_LONGEST_WAIT_S = 3600.0  # longest single wait: clocks do not accept every number
_LONGEST_DELAY_S = 3.0
_DELAY_GROWTH = 1.5
_TICK_S = 1.0  # a rank's wait for its share between two exchanges of status


class NoBatch(Exception):
    """No batch came within the limits; the message says who was missing and what to do."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for one batch: attempts with growing delays, and a total limit."""

    timeout_s: float = 30.0  # per attempt
    attempts: int = 10
    retry_delay_s: float = 0.5  # after the first attempt; grows by half each time, at most 3 s
    max_wait_s: float = math.inf

    def waits(self) -> Iterator[tuple[float, float]]:
        """Yields (seconds of the attempt, delay until the next) per attempt; the last has no delay."""
        delay, left = self.retry_delay_s, self.max_wait_s
        for attempt in range(1, self.attempts + 1):
            pause = delay if attempt < self.attempts else 0.0
            if self.timeout_s + pause >= left:
                yield left, 0.0
                return
            yield self.timeout_s, pause
            left -= self.timeout_s + pause
            delay = min(delay * _DELAY_GROWTH, max(_LONGEST_DELAY_S, self.retry_delay_s))


def patience_of(waiting: WaitingConfig) -> Patience | None:
    """Returns the configured limits; None if there are none: wait for ever."""
    given: dict[str, Any] = {
        "timeout_s": waiting.batch_timeout,
        "attempts": waiting.batch_attempts,
        "retry_delay_s": waiting.batch_retry_delay,
        "max_wait_s": waiting.max_wait_time,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return Patience(**given) if given else None


class BatchWait:
    """The wait for one batch, starting at construction: how long to wait at a time, and what to print then.

    Without limits (`patience` is None) it waits for ever, and prints nothing.
    """

    def __init__(
        self, patience: Patience | None, missing: Callable[[], str], say: Callable[[str], None]
    ) -> None:
        self._patience = patience
        self._missing = missing
        self._say = say
        self._begun = time.monotonic()
        self._words = itertools.repeat(_LONGEST_WAIT_S) if patience is None else self._attempts(patience)
        # shared by all batches within these limits
        self.first_s = min(next(self._words), _LONGEST_WAIT_S)
        self._until = self._begun + self.first_s

    @property
    def left_s(self) -> float:
        """Seconds until `look` has something to do; 0 if it has now."""
        return min(max(self._until - time.monotonic(), 0.0), _LONGEST_WAIT_S)

    def look(self) -> None:
        """Prints that an attempt is over, once it is. Never blocks. Raises `NoBatch` after the last one."""
        while time.monotonic() >= self._until:
            self._until += next(self._words)

    def _attempts(self, patience: Patience) -> Iterator[float]:
        attempt = 0
        for attempt, (wait, delay) in enumerate(patience.waits(), 1):
            yield wait
            if delay > 0.0:
                self._say(
                    f"no batch in attempt {attempt} of {patience.attempts}, {self._waited_s:.1f} s "
                    f"in all: {self._missing()}; the next begins in {delay:.1f} s"
                )
                yield delay  # the batch may arrive in this time
        raise NoBatch(
            f"no batch in {self._waited_s:.1f} s, {attempt} of {patience.attempts} attempts of "
            f"{patience.timeout_s:g} s: {self._missing()} -> start environments on this bridge and --resume, "
            "or raise --max-wait-time, --batch-timeout or --batch-attempts"
        )

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._begun


class HubSource:
    """The batches of a feed, which its opener closes, for a learner of one process."""

    def __init__(self, feed: Feed, config: LearnerConfig, stops: StopSignals) -> None:
        self._feed, self._consumer, self._config, self._stops = feed, feed.consumer, config, stops
        self._steps: dict[int, Step] = {}  # handed out, by their batches

    @property
    def policy_version(self) -> int:
        """The last published version."""
        return self._consumer.policy_version

    @property
    def training_version(self) -> int:
        """The version of the weights being trained; above `policy_version` between two publications."""
        return self._consumer.training_version

    def note_training_version(self, version: int) -> None:
        """Counts staleness up to a version that is not published. Never blocks."""
        self._consumer.note_training_version(version)

    def begin_run(self, version: int, run_id: str, same_as: int | None) -> None:
        """Announces the weights with which this process starts. Never blocks."""
        self._consumer.publish_policy_version(version, run_id=run_id, same_as=same_as)

    def end_run(self) -> None:
        """Tells the bridge that all it was trained to is saved. Never blocks."""
        self._consumer.end_run()

    def publish_version(self, version: int) -> None:
        """Announces new weights. Never blocks."""
        self._consumer.publish_policy_version(version)

    def take_evaluations(self) -> list[Evaluated]:
        """As of the feed."""
        return self._feed.take_evaluations()

    def stats(self) -> dict[str, float]:
        """Counters of the bridge, and of the feed."""
        return self._feed.stats()

    @contextmanager
    def batches(self) -> Iterator[Iterator[shmbridge.Batch]]:
        """Yields an iterator that waits for each batch, until the bridge is drained.

        Its `next` raises NoBatch when the limits are exhausted, Stopped, and the bridge's errors.
        """
        with device_copies(self._config) as copies:
            self._feed.make = None if copies is None else copies.batch
            try:
                yield iter(self._next, None)
            except BaseException as error:
                if not may_be_data(error):
                    self.give_back()
                raise
            finally:
                self._feed.rest()  # no batch is formed once the copies are closed

    def _next(self) -> shmbridge.Batch | None:
        missing = functools.partial(who_is_missing, self._consumer, self._config.batch.groups)
        wait = BatchWait(patience_of(self._config.waiting), missing, say)
        with self._consumer.one_wait():  # of all attempts
            while True:
                try:
                    step = self._feed.take(min(wait.left_s, wait.first_s))
                except shmbridge.ConsumerEmpty:
                    wait.look()
                except Drained:
                    return None
                else:
                    break
        self._steps[id(step.batch)] = step
        self._stops.check()
        return step.batch

    def trained(self, batches: Iterable[shmbridge.Batch]) -> None:
        """Ends a step: its groups are released, or held for a checkpoint. Never blocks for records."""
        self._feed.trained([self._steps.pop(id(batch)) for batch in batches])

    @property
    def holds(self) -> bool:
        """Whether trained batches wait for a checkpoint."""
        return self._feed.release_at == "checkpoint"

    def out(self) -> list[shmbridge.Batch]:
        """Returns the batches that are handed out and not trained."""
        return [step.batch for step in self._steps.values()]

    def longest_row(self) -> tuple[int, str]:
        """Returns the tokens of the longest row that is out, and its group and environment."""
        return max(step.longest_row() for step in self._steps.values())

    def saved(self) -> None:
        """Releases what was held for a checkpoint, which is on disk. Never blocks."""
        self._feed.checkpointed()

    def failed(self, error: Exception) -> None:
        """Counts a failure of the batches that are out; they come again, but for a group at fault.

        Blocks for the disk. Raises the error if it is to end the run.
        """
        self._feed.failed(self._taken_back(), error)

    def give_back(self) -> None:
        """Returns the batches that are out: they come again, and nothing is counted. Never blocks."""
        for step in reversed(self._taken_back()):
            self._feed.give_back(step)

    def _taken_back(self) -> list[Step]:
        out = list(self._steps.values())
        self._steps.clear()
        return out


def may_be_data(error: BaseException) -> bool:
    """Returns whether the batches that are out may be at fault for an error of their step."""
    return blames_groups(error) and not isinstance(
        error, (NoBatch, NoAdvantages, Refusal, shmbridge.ShmBridgeError)
    )


def device_copies(config: LearnerConfig) -> AbstractContextManager[DeviceCopies | None]:
    """Returns direct copies to the device, or None if batches are gathered on the host first."""
    if config.batch.host_copy != "direct":
        return nullcontext()
    from shmbridge.consumers.device_batch import DeviceCopies

    return DeviceCopies(device_kind(config.compute.device))


def feed_of(config: LearnerConfig, run: shmbridge.Run, screen: Callable[[Any], bool]) -> Feed:
    """Returns the run's feed; it calls `screen` for each group. Raises as Feed."""
    limit, tap = config.staleness.max_off_policy_steps, recorder(config)
    try:
        feed = Feed(
            config.run.bridge,
            groups=config.batch.groups,
            trained_together=config.batch.groups * config.batch.accumulate,
            release_at="checkpoint" if config.holds_until_saved else config.checkpoints.release_at,
            max_staleness=config.staleness.max_staleness,
            set_aside_after=config.batch.set_aside_after,
            run=run,
            run_dir=config.run_dir,
            start="from-scratch",  # `starting_point.py` has decided
            prefetch=config.batch.prefetch,
            screen=screen,
            lanes=config.batch.lanes or "auto",
            allocation_wait_s=config.batch.allocation_wait,
            policy=config.staleness.scheduler,
            max_off_policy_steps=limit,
            groups_per_step=None if limit is None else config.batch.groups,
            tap=tap,
        )
    except BaseException:
        if tap is not None:
            tap.close()
        raise
    say(f"groups are released when their step is {'trained' if feed.release_at == 'step' else 'saved'}")
    return feed


def recorder(config: LearnerConfig) -> Recorder | None:
    """Returns the recorder of `--record`, or None without it. Raises ArchiveTaken, OSError."""
    if config.checkpoints.record is None:
        return None
    from shmbridge.archive.recorder import Recorder

    return Recorder(config.checkpoints.record, on_full_disk=config.checkpoints.on_full_disk)


def who_is_missing(consumer: shmbridge.Consumer, groups: int) -> str:
    """Returns a short text on what a batch waits for. Any thread; never blocks."""
    stats = consumer.stats()
    live, dead = int(stats["lanes_live"]), int(stats["lanes_dead"])
    lanes = (
        f"{live} of {counted(live + dead, 'lane')} {'has' if live == 1 else 'have'} a living producer"
        if live + dead
        else "no environment has a lane"
    )
    state = ", the bridge is paused" if consumer.paused else ""
    if stats.get("lanes_waiting"):
        state += ", more environments wait for a lane: raise --lanes"
    return f"{lanes}, {int(stats['queue_groups'])} of {groups} groups are there{state}"


def empty_batch() -> shmbridge.Batch:
    """Returns a packed batch without rows, for a rank that has none but still takes part in the step."""
    batch = shmbridge.Batch([], "packed")
    batch._columns["tokens"] = batch.lengths
    return batch


@dataclass
class RankStatus:
    """One rank's status before the next step."""

    share: Literal["waited for", "here", "drained"] = "waited for"
    step: int = -1  # of the share that this rank has
    signum: int = 0
    gave_up: str = ""
    failed: str = ""


class RankSource:
    """This rank's shares of the batches of a bridge. A step that fails on one rank ends the run of all.

    Args:
        world: the ranks; rank 0 is the hub.
        rank: this one's place at the bridge.
        feed: which deals the steps out, on rank 0; its opener closes it.
        config: groups of a batch over all ranks, limits on staleness and on waiting.
        stops: a signal ends the run on all ranks, between two steps.
    """

    def __init__(
        self, world: World, rank: shmbridge.Rank, feed: Feed | None, config: LearnerConfig, stops: StopSignals
    ) -> None:
        self._world, self._rank, self._feed = world, rank, feed
        self._consumer = consumer = None if feed is None else feed.consumer
        self._config, self._stops = config, stops
        self._steps: list[Step] = []  # dealt out, and not trained
        self._asks_feed = True  # for the step whose share is waited for
        # last published version
        self.policy_version = world.broadcast(-1 if consumer is None else consumer.policy_version)
        self.training_version = self.policy_version  # version of the weights being trained
        # whether trained groups wait for a checkpoint
        self.holds = world.broadcast(feed is not None and feed.release_at == "checkpoint")

    def note_training_version(self, version: int) -> None:
        """Makes rank 0 count staleness up to a version that is not published. Blocks as `publish_version`."""
        if self._consumer is not None:
            self._consumer.note_training_version(version)
        self.training_version = self._world.broadcast(version)

    def begin_run(self, version: int, run_id: str, same_as: int | None) -> None:
        """Makes rank 0 announce the weights with which it starts. Blocks as `publish_version`."""
        if self._consumer is not None:
            self._consumer.publish_policy_version(version, run_id=run_id, same_as=same_as)
        self.policy_version = self.training_version = self._world.broadcast(version)

    def end_run(self) -> None:
        """Makes rank 0 tell the bridge that all it was trained to is saved. Never blocks."""
        if self._consumer is not None:
            self._consumer.end_run()

    def publish_version(self, version: int) -> None:
        """Makes rank 0 announce new weights. Blocks until it has: no rank may release earlier."""
        if self._consumer is not None:
            self._consumer.publish_policy_version(version)
        self.policy_version = self.training_version = self._world.broadcast(version)

    def take_evaluations(self) -> list[Evaluated]:
        """As of the feed, which rank 0 has; none on other ranks."""
        return [] if self._feed is None else self._feed.take_evaluations()

    def trained(self, batches: Iterable[shmbridge.Batch]) -> None:
        """Ends a step: rank 0's feed releases its groups once all ranks did this, or holds them for a
        checkpoint. Blocks for an answer of the hub, at most a second.
        """
        for batch in batches:
            batch.release()
        self._rank.report_done()
        if self._feed is not None:
            self._feed.trained(self._steps)
            self._steps = []

    def saved(self) -> None:
        """Releases what was held for a checkpoint, which is on disk. Never blocks."""
        if self._feed is not None:
            self._feed.checkpointed()

    def stats(self) -> dict[str, float]:
        """Returns the counters of the bridge and the feed on rank 0, this rank's on the others."""
        return (self._feed or self._rank).stats()

    @contextmanager
    def batches(self) -> Iterator[Iterator[shmbridge.Batch]]:
        """Yields an iterator over this rank's shares, equally many on each, until the bridge is drained.

        An unreadable share has no rows. `next` blocks for the other ranks, too, and raises on all of them:
        NoBatch at the limits, Stopped, PeerFailed for another rank's error, and the bridge's errors.
        """
        try:
            yield self._iterate()
        except BaseException as error:
            if may_be_data(error):
                self._rank.report_failed()
            for step in self._steps:
                step.early = True  # counted by now, or not at fault
            raise
        self._rank.report_done()  # the hub must still be open to receive it
        self._world.broadcast(0)

    def _iterate(self) -> Iterator[shmbridge.Batch]:
        while True:
            share = self._next_share()
            if share == "drained":
                return
            batch = None if share is None else self._rank.gather(share)
            yield empty_batch() if batch is None else batch

    def _next_share(self) -> RankShare | Literal["drained"] | None:
        """Returns the share of the next step; None if this rank has none."""
        wait = BatchWait(None, str, lambda line: None)
        if self._consumer is not None:  # rank 0 prints, and gives up for all
            missing = functools.partial(who_is_missing, self._consumer, self._config.batch.groups)
            wait = BatchWait(patience_of(self._config.waiting), missing, say)
        share = None
        own, self._asks_feed = RankStatus(), self._feed is not None
        with self._rank.one_wait(), nullcontext() if self._consumer is None else self._consumer.one_wait():
            while True:
                failure: Exception | None = None
                try:
                    if own.share == "waited for":
                        share, own = self._ask(min(_TICK_S, wait.left_s))
                except Exception as error:  # reported to the other ranks, whatever it is
                    failure, own.failed = error, f"{type(error).__name__}: {error}"
                try:
                    wait.look()
                except NoBatch as error:
                    own.gave_up = str(error) if own.share == "waited for" else ""
                own.signum = self._stops.received or 0
                words = [RankStatus(**said) for said in self._world.all_gather(asdict(own))]
                if failure is not None:
                    raise failure
                leave_together(words)
                if all(word.share == "drained" for word in words):
                    return "drained"
                if all(word.share != "waited for" for word in words):
                    return share

    def _ask(self, timeout_s: float) -> tuple[RankShare | None, RankStatus]:
        if self._feed is not None and self._asks_feed:
            try:
                self._steps.append(self._feed.take(timeout_s))
            except shmbridge.ConsumerEmpty:
                return None, RankStatus()
            except Drained:
                pass  # which the ranks hear
            self._asks_feed = False
        try:
            share = self._rank.next_share(timeout_s)
        except (shmbridge.ConsumerEmpty, shmbridge.NoConsumer):
            return None, RankStatus()
        return share, RankStatus("drained") if share is None else RankStatus("here", share.manifest.step)


def leave_together(words: list[RankStatus]) -> None:
    """Raises if any rank has a reason to leave: an error first, then a signal, then the missing batch."""
    for rank, word in enumerate(words):
        if word.failed:
            raise PeerFailed(f"rank {rank}: {word.failed}")
    steps = {word.step for word in words if word.share == "here"}
    if len(steps) > 1:
        raise PeerFailed(
            f"the ranks hold shares of different batches, {sorted(steps)}: another hub was here meanwhile"
        )
    for word in words:
        if word.signum:
            raise Stopped(word.signum)
    for word in words:
        if word.gave_up:
            raise NoBatch(word.gave_up)


@contextmanager
def opened(
    config: LearnerConfig, run: shmbridge.Run, screen: Callable[[Any], bool], world: World, stops: StopSignals
) -> Iterator[HubSource | RankSource]:
    """Opens the bridge for this rank, and as its hub on rank 0; yields the batch source.

    Raises:
        The errors of Consumer and Rank; PeerFailed if they were raised on another rank.
    """
    if world.size == 1:
        with feed_of(config, run, screen) as alone:
            yield HubSource(alone, config, stops)
        return
    if config.batch.host_copy == "direct" and world.is_main:
        say("--host-copy direct is for one process: each rank gathers its shares on the host")
    with ExitStack() as stack:
        with world.together():
            feed = stack.enter_context(feed_of(config, run, screen)) if world.is_main else None
            if feed is not None:
                feed.serve_ranks(world.size)
            rank = stack.enter_context(shmbridge.Rank(config.run.bridge, world.rank, world.size))
            if feed is None and config.batch.set_aside_after:
                rank.note_crashes(config.run_dir / "set_aside")
        yield RankSource(world, rank, feed, config, stops)
