"""Where a learner's batches come from, and who hears that one is done: one process that is the hub of its
bridge.

Knows the consumer; knows nothing of models. Called by the GRPO learner (`grpo.py`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import shmbridge
from shmbridge.consumers.learner.config.staleness_options import consumer_arguments
from shmbridge.consumers.learner.data.batch_wait import BatchWait, patience_of
from shmbridge.consumers.learner.report.log import say
from shmbridge.consumers.learner.stopping import StopSignals

if TYPE_CHECKING:
    from shmbridge.batch import MakeBatch
    from shmbridge.consumers.device_batch import DeviceCopies

_DRAINED = object()


class HubSource:
    """The batches of a consumer, for the one process that trains on them.

    Args:
        consumer: the hub; closed by whoever opened it.
        options: groups of a batch, limits on staleness and on waiting.
        stops: looked at between two batches.
    """

    def __init__(self, consumer: shmbridge.Consumer, options: argparse.Namespace, stops: StopSignals) -> None:
        self._consumer, self._options, self._stops = consumer, options, stops
        self._make: MakeBatch | None = None

    @property
    def policy_version(self) -> int:
        """The last published."""
        return self._consumer.policy_version

    @property
    def training_version(self) -> int:
        """Of the weights in training; above the last published between two of these."""
        return self._consumer.training_version

    def note_training_version(self, version: int) -> None:
        """Has staleness counted up to weights that are not published. Never blocks."""
        self._consumer.note_training_version(version)

    def publish_version(self, version: int) -> None:
        """Tells everybody of new weights. Never blocks."""
        self._consumer.publish_policy_version(version)

    def stats(self) -> dict[str, float]:
        """Counters of the bridge."""
        return self._consumer.stats()

    @contextmanager
    def batches(self) -> Iterator[Iterator[Any]]:
        """Yields an iterator that waits for batch after batch, until the bridge is drained.

        Its `next` raises NoBatch when the limits are exhausted, Stopped, and what the bridge raises.
        """
        # which forms none after its end
        with device_copies(self._options) as copies, closing(self._iterate()) as batches:
            self._make = None if copies is None else copies.batch
            yield batches

    def _iterate(self) -> Generator[Any, None, None]:
        patience = patience_of(self._options)
        missing = functools.partial(who_is_missing, self._consumer, self._options.groups)
        batches: Iterator[Any] | None = None
        while True:
            wait = BatchWait(patience, missing, say)
            batch = None
            while batch is None:
                # one that timed out has ended; each waits for every one of its batches equally long
                if batches is None:
                    batches = self._batches(min(wait.left_s, wait.first_s))
                try:
                    batch = next(batches, _DRAINED)
                except shmbridge.ConsumerEmpty:
                    batches = None
                    wait.look()
            if batch is _DRAINED:
                return
            self._stops.check()
            yield batch

    def _batches(self, timeout_s: float) -> Iterator[Any]:
        options = self._options
        return self._consumer.batches(
            groups=options.groups,
            layout="packed",
            max_staleness=options.max_staleness,
            prefetch=options.prefetch,
            hold="step" if most_held(options) == 1 else "caller",
            timeout_s=timeout_s,
            make=self._make,
        )


def device_copies(options: argparse.Namespace) -> AbstractContextManager[DeviceCopies | None]:
    """Returns the way straight to the device, or None: batches are gathered on the host first."""
    if options.host_copy != "direct":
        return nullcontext()
    from shmbridge.consumers.device_batch import DeviceCopies
    from shmbridge.consumers.learner.train.setup import device_kind

    return DeviceCopies(device_kind(options))


def hub(options: argparse.Namespace, run: shmbridge.Run, screen: Callable[[Any], bool]) -> shmbridge.Consumer:
    """Returns the hub of the bridge that the options name, which asks `screen` about each group.

    Raises as Consumer.
    """
    consumer = shmbridge.Consumer(
        options.bridge,
        run=run,
        lanes=options.lanes or "auto",
        allocation_wait_s=options.allocation_wait,
        **consumer_arguments(options),
    )
    consumer.screen(screen)
    return consumer


def most_held(options: argparse.Namespace) -> int:
    """Returns how many batches the learner holds at most before it releases any."""
    return int(options.accumulate * (options.save_every if options.hold_until_saved else 1))


def who_is_missing(consumer: shmbridge.Consumer, groups: int) -> str:
    """Returns what a batch waits for, in a few words. Any thread; never blocks."""
    stats = consumer.stats()
    live, dead = int(stats["lanes_live"]), int(stats["lanes_dead"])
    lanes = (
        f"{live} of {live + dead} lanes have a living producer"
        if live + dead
        else "no environment has a lane"
    )
    state = ", the bridge is paused" if consumer.paused else ""
    if stats.get("lanes_waiting"):
        state += ", more environments wait for a lane: raise --lanes"
    return f"{lanes}, {int(stats['queue_groups'])} of {groups} groups are there{state}"
