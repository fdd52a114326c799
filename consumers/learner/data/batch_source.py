"""The batch source of a single-process learner, which is the hub of its bridge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import shmbridge
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.feed import Drained, Feed, Step, blames_groups
from shmbridge.consumers.learner.config.options import LearnerConfig
from shmbridge.consumers.learner.data.batch_wait import BatchWait, NoBatch, patience_of
from shmbridge.consumers.learner.stopping import StopSignals
from shmbridge.consumers.learner.types import Refusal
from shmbridge.consumers.learner.world import device_kind, say
from shmbridge.control.messages import Evaluated
from shmbridge.errors import counted

if TYPE_CHECKING:
    from shmbridge.archive.recorder import Recorder
    from shmbridge.consumers.device_batch import DeviceCopies


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
