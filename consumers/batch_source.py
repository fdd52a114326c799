"""Where a learner's batches come from, and who hears that one is done: one process that is the hub of its bridge.

Knows the consumer; knows nothing of models. Called by the GRPO learner (`grpo.py`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import shmbridge
from shmbridge.consumers.batch_wait import BatchWait, patience_of
from shmbridge.consumers.metrics_log import say
from shmbridge.consumers.stopping import StopSignals


class HubSource:
    """The batches of a consumer, for the one process that trains on them.

    Args:
        consumer: the hub; closed by whoever opened it.
        options: groups of a batch, limits on staleness and on waiting.
        stops: looked at between two batches.
    """

    def __init__(self, consumer: shmbridge.Consumer, options: argparse.Namespace, stops: StopSignals) -> None:
        self._consumer, self._options, self._stops = consumer, options, stops

    @property
    def policy_version(self) -> int:
        """The last published."""
        return self._consumer.policy_version

    def publish_version(self, version: int) -> None:
        """Tell everybody of new weights. Never blocks."""
        self._consumer.publish_policy_version(version)

    def stats(self) -> dict[str, float]:
        """Counters of the bridge."""
        return self._consumer.stats()

    @contextmanager
    def batches(self) -> Iterator[Iterator[Any]]:
        """Yield an iterator that waits for batch after batch, until the bridge is drained.

        Its `next` raises NoBatch when the limits are exhausted, Stopped, and what the bridge raises.
        """
        options = self._options
        batches = self._consumer.batches(
            groups=options.groups, layout="packed", max_staleness=options.max_staleness, prefetch=1, hold="step"
        )
        missing = functools.partial(who_is_missing, self._consumer, options.groups)
        with BatchWait(batches, patience_of(options), missing, say) as waited_for:
            yield self._checked(waited_for)

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._stops.check()
            yield batch


def who_is_missing(consumer: shmbridge.Consumer, groups: int) -> str:
    """Return what a batch waits for, in a few words. Any thread; never blocks."""
    stats = consumer.stats()
    live, dead = int(stats["lanes_live"]), int(stats["lanes_dead"])
    lanes = (
        f"{live} of {live + dead} lanes have a living producer"
        if live + dead
        else "no environment has a lane"
    )
    state = ", the bridge is paused" if consumer.paused else ""
    return f"{lanes}, {int(stats['queue_groups'])} of {groups} groups are there{state}"
