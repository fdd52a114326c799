"""A producer of the fuzz: puts records in every way there is, and logs each put before and after it.

Knows the public Producer; knows nothing of who kills it. Runs in a forked child.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import shmbridge

from .ledger import Order, ProducerWords, State, producer_name
from .pattern import Pattern

_LANES = ("128K", "256K", "1M")


class _GivenUp(Exception):
    pass


class ProducerRole:
    """One incarnation."""

    def __init__(self, bridge: str, number: int, words: memoryview, pattern: Pattern) -> None:
        self._random = random.Random(f"{pattern.seed}/producer/{number}")
        self._number, self._words, self._pattern = number, words, pattern
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._producer = shmbridge.Producer(
            bridge, env_name="fuzz", lane_bytes=self._random.choice(_LANES), producer_id=producer_name(number)
        )

    def run(self, most: int | None) -> None:
        """Puts until it is told to quit, or `most` records; half of those that end by themselves do so
        without close().
        """
        words, ways = self._words, self._ways()
        words[ProducerWords.STATE] = State.RUNNING
        while most is None or self._next < most:
            order = words[ProducerWords.ORDER]
            if order == Order.QUIT:
                break
            if order == Order.HOLD:
                words[ProducerWords.STATE] = State.HOLDING
                time.sleep(0.001)
                continue
            words[ProducerWords.STATE] = State.RUNNING
            next(ways)()
        if most is None or self._random.random() < 0.5:
            self._producer.close()
        words[ProducerWords.STATE] = State.CLOSED

    def _ways(self) -> Iterator[Callable[[], None]]:
        kinds = [self._put, self._put_many, self._claim, self._give_claim_up, self._put_async, self._pause]
        while True:
            yield from self._random.choices(kinds, [60, 16, 20, 2, 1, 0.3], k=64)

    def _begin(self) -> dict[str, Any]:
        columns = self._pattern.columns(self._number, self._next)
        self._next += 1
        self._words[ProducerWords.STARTED] = self._next
        return columns

    def _end(self, sequence: int | None, expected: int) -> None:
        if sequence != expected:
            raise AssertionError(
                f"{producer_name(self._number)} put record {expected} and was told {sequence}"
            )
        self._words[ProducerWords.RETURNED] = expected + 1

    def _put(self) -> None:
        expected = self._next
        self._end(self._producer.put(self._begin()), expected)

    def _put_many(self) -> None:
        """The next of the groups is asked for when the last one is committed."""
        first, count = self._next, self._random.randint(2, 8)

        def groups() -> Iterator[dict[str, Any]]:
            for sequence in range(first, first + count):
                yield self._begin()
                self._words[ProducerWords.RETURNED] = sequence + 1

        told = self._producer.put_many(groups())
        if told != list(range(first, first + count)):
            raise AssertionError(f"{producer_name(self._number)} put records {first}.. and was told {told}")

    def _claim(self) -> None:
        expected = self._next
        with self._open_claim() as slot:
            self._next += 1
            self._words[ProducerWords.STARTED] = self._next
            self._pattern.fill(slot, self._number, expected)
        self._end(slot.sequence, expected)

    def _give_claim_up(self) -> None:
        """Gives a half-written claim up: its record must never exist."""
        with contextlib.suppress(_GivenUp), self._open_claim() as slot:
            slot["tokens"][:] = -1
            raise _GivenUp

    def _open_claim(self) -> Any:
        return self._producer.claim(*self._pattern.claimed(self._number, self._next))

    def _put_async(self) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._burst(self._random.randint(4, 24)))

    async def _burst(self, count: int) -> None:
        first = self._next
        told = await asyncio.gather(*(self._producer.put_async(self._begin()) for _ in range(count)))
        if told != list(range(first, first + count)):
            raise AssertionError(f"{producer_name(self._number)} put records {first}.. and was told {told}")
        self._words[ProducerWords.RETURNED] = first + count

    def _pause(self) -> None:
        time.sleep(self._random.uniform(0.001, 0.02))


def produce(bridge: str, number: int, words: memoryview, pattern: Pattern, most: int | None) -> None:
    ProducerRole(bridge, number, words, pattern).run(most)


def produce_one(bridge: str, number: int, words: memoryview, pattern: Pattern) -> None:
    """One record, then nothing until the kill: the death of an idle producer is timed."""
    role = ProducerRole(bridge, number, words, pattern)
    role._put()
    words[ProducerWords.STATE] = State.HOLDING
    time.sleep(600)
