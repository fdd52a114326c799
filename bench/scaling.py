"""Lanes and their consumer in one process and one thread: the cost of a put and a take by themselves, in CPU
time of that thread.

Nothing runs beside it, so neighbours and the scheduler are not in the figures; nor is the cost of moving a
line between two cores. Knows producers and a consumer by their public names. Called by the suites.
"""

import os
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import shmbridge
from shmbridge.bench.baselines.memcpy_baseline import touch
from shmbridge.bench.groups import SOURCES, Form, Group, Shape, make
from shmbridge.bench.machine import LANE_BYTES
from shmbridge.sizing import record_bytes, slots_of

MOST_SOURCE_BYTES = 64 << 20  # of values: as Python lists they take ten times as much


@dataclass(slots=True)
class Cost:
    """CPU seconds of one thread for so many groups."""

    groups: int = 0
    put_s: float = 0.0
    take_s: float = 0.0

    def add(self, other: "Cost") -> None:
        self.groups += other.groups
        self.put_s += other.put_s
        self.take_s += other.take_s

    @property
    def seconds_per_group(self) -> float:
        """Of a put and a take."""
        return (self.put_s + self.take_s) / self.groups

    def figures(self, shape: Shape) -> dict[str, float]:
        """By the group, by the token, by the byte of values."""
        put, take = (1e9 * each / self.groups for each in (self.put_s, self.take_s))
        return {
            "put_us_per_group": put / 1e3,
            "put_ns_per_token": put / shape.tokens,
            "put_ns_per_byte": put / shape.bytes,
            "take_us_per_group": take / 1e3,
            "take_ns_per_token": take / shape.tokens,
            "take_ns_per_byte": take / shape.bytes,
        }


class OneThread:
    """Several producers with a lane each and one consumer, on a bridge of their own; a context manager."""

    def __init__(self, shape: Shape, form: Form, lanes: int = 1, lane_bytes: int = LANE_BYTES) -> None:
        self.shape, self.lane_bytes = shape, lane_bytes
        self._sources = sources(shape, form)
        self._open = ExitStack()
        bridge = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
        try:
            self._open.callback(shmbridge.clean, bridge, dry_run=False)
            self.consumer = self._open.enter_context(shmbridge.Consumer(bridge, lanes=lanes))
            self.producers = [
                self._open.enter_context(
                    shmbridge.Producer(bridge, env_name="bench", lane_bytes=lane_bytes, on_full="raise")
                )
                for _ in range(lanes)
            ]
        except BaseException:
            self._open.close()
            raise

    @property
    def fits(self) -> int:
        """Groups that a lane certainly holds at a time."""
        columns = dict.fromkeys((*self.shape.columns, *(["score"] if self.shape.has_score else [])))
        each = record_bytes(self.shape.length, rows=self.shape.rows, columns=columns)
        return min(self.lane_bytes // each, slots_of(self.lane_bytes))

    def put(self, groups: int, lanes: int | None = None) -> float:
        """Puts so many groups, into the first `lanes` lanes in turn."""
        used, given = self.producers[:lanes], self._sources
        began = time.thread_time()
        for n in range(groups):
            used[n % len(used)].put(given[n % len(given)])
        return time.thread_time() - began

    def take(self, groups: int) -> float:
        """Takes and releases so many groups, every byte of their columns read in place."""
        columns, consumer = self.shape.columns, self.consumer
        began = time.thread_time()
        while groups:
            for record in consumer.poll(min(groups, 256)):
                groups -= 1
                with record:
                    for name in columns:
                        touch(record[name].values)
        return time.thread_time() - began

    def gather(self, groups: int, layout: Literal["packed", "padded"]) -> float:
        """Takes so many groups as one batch; the cost of reading it is not counted."""
        began = time.thread_time()
        batch = next(self.consumer.batches(groups=groups, layout=layout, prefetch=0))
        spent = time.thread_time() - began
        batch.release()
        return spent

    def poll_empty(self, times: int) -> float:
        """CPU seconds of one poll that finds nothing."""
        began = time.thread_time()
        for _ in range(times):
            self.consumer.poll()
        return (time.thread_time() - began) / times

    def turn(self, groups: int, lanes: int | None = None) -> Cost:
        """Puts so many groups, then takes them."""
        return Cost(groups, self.put(groups, lanes), self.take(groups))

    def turns(self, groups: int, seconds: float, lanes: int | None = None) -> Cost:
        """The same again and again until that much CPU time is spent."""
        cost = Cost()
        while cost.put_s + cost.take_s < seconds:
            cost.add(self.turn(groups, lanes))
        return cost

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sources = []
        self._open.close()


def sources(shape: Shape, form: Form) -> list[Group]:
    """Different groups to put in turn; fewer where they are large."""
    return [make(shape, form, seed) for seed in range(max(min(SOURCES, MOST_SOURCE_BYTES // shape.bytes), 2))]
