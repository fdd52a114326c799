"""The batch source of a single-process learner, which is the hub of its bridge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import shmbridge
from shmbridge.consumers.learner.config.run_options import LearnerConfig
from shmbridge.consumers.learner.data.batch_wait import BatchWait, patience_of
from shmbridge.consumers.learner.stopping import StopSignals
from shmbridge.consumers.learner.world import device_kind, say
from shmbridge.shown import counted

if TYPE_CHECKING:
    from shmbridge.archive.recorder import Recorder
    from shmbridge.batch import MakeBatch
    from shmbridge.consumers.device_batch import DeviceCopies


class HubSource:
    """The batches of a consumer, which its opener closes, for a learner of one process."""

    def __init__(self, consumer: shmbridge.Consumer, config: LearnerConfig, stops: StopSignals) -> None:
        self._consumer, self._config, self._stops = consumer, config, stops
        self._make: MakeBatch | None = None

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

    def stats(self) -> dict[str, float]:
        """Counters of the bridge."""
        return self._consumer.stats()

    @contextmanager
    def batches(self) -> Iterator[Iterator[shmbridge.Batch]]:
        """Yields an iterator that waits for each batch, until the bridge is drained.

        Its `next` raises NoBatch when the limits are exhausted, Stopped, and the bridge's errors.
        """
        # no batch is formed after close
        with device_copies(self._config) as copies, closing(self._iterate()) as batches:
            self._make = None if copies is None else copies.batch
            yield batches

    def _iterate(self) -> Generator[shmbridge.Batch, None, None]:
        patience = patience_of(self._config.waiting)
        missing = functools.partial(who_is_missing, self._consumer, self._config.batch.groups)
        batches: Iterator[shmbridge.Batch] | None = None
        while True:
            wait = BatchWait(patience, missing, say)
            batch: shmbridge.Batch | Literal["drained"] | None = None
            with self._consumer.one_wait():  # of all attempts
                while batch is None:
                    # an iterator that timed out has ended; each applies one timeout to all its batches
                    if batches is None:
                        batches = self._batches(min(wait.left_s, wait.first_s))
                    try:
                        batch = next(batches, "drained")
                    except shmbridge.ConsumerEmpty:
                        batches = None
                        wait.look()
            if batch == "drained":
                return
            self._stops.check()
            yield batch

    def _batches(self, timeout_s: float) -> Iterator[shmbridge.Batch]:
        config = self._config
        return self._consumer.batches(
            groups=config.batch.groups,
            layout="packed",
            max_staleness=config.staleness.max_staleness,
            prefetch=config.batch.prefetch,
            hold="step" if config.most_held == 1 else "caller",
            timeout_s=timeout_s,
            make=self._make,
        )


def device_copies(config: LearnerConfig) -> AbstractContextManager[DeviceCopies | None]:
    """Returns direct copies to the device, or None if batches are gathered on the host first."""
    if config.batch.host_copy != "direct":
        return nullcontext()
    from shmbridge.consumers.device_batch import DeviceCopies

    return DeviceCopies(device_kind(config.compute.device))


def hub(config: LearnerConfig, run: shmbridge.Run, screen: Callable[[Any], bool]) -> shmbridge.Consumer:
    """Returns the hub of the configured bridge; it calls `screen` for each group. Raises as Consumer."""
    limit = config.staleness.max_off_policy_steps
    tap = recorder(config)
    try:
        consumer = shmbridge.Consumer(
            config.run.bridge,
            run=run,
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
    consumer.screen(screen)
    return consumer


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
