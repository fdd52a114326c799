"""The batch source of a learner with several ranks: each reads its share of a step of rank 0's feed.

No rank may decide alone: one that gave up, was stopped or found the bridge drained would leave the others
blocked in a collective. So each waits for its share for a short time, then all exchange their status, until
all can continue or leave together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import shmbridge
from shmbridge.consumers.feed import Drained, Feed, Step
from shmbridge.consumers.learner.config.options import LearnerConfig
from shmbridge.consumers.learner.data.batch_source import HubSource, feed_of, may_be_data, who_is_missing
from shmbridge.consumers.learner.data.batch_wait import BatchWait, NoBatch, patience_of
from shmbridge.consumers.learner.stopping import Stopped, StopSignals
from shmbridge.consumers.learner.world import PeerFailed, World, say
from shmbridge.control.messages import Evaluated
from shmbridge.rank import RankShare

_TICK_S = 1.0  # a rank's wait for its share between two exchanges of status


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
