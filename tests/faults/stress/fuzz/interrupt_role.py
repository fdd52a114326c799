"""A consumer and a producer in which a signal's handler raises at random instants.

They go on, or end in every way there is.

They know the public Consumer and Producer, and nothing of the referee. Run in forked children.
"""

import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import shmbridge

from .ledger import ConsumerLog, Order, ProducerWords, State
from .pattern import Pattern
from .producer_role import ProducerRole
from .reader import Reader

GROUPS = 3
ENDED_BY_ITSELF = 9  # what STEP says before a child kills itself
RAISED = ConsumerLog.TIME_SEEN  # the word that counts interrupts
_LIFE_S = (0.1, 0.6)
_EVERY_S = (0.00005, 0.0012)
_TIMEOUT_S = 0.02
_LOST_S = 1.0


class Interrupt(KeyboardInterrupt):
    """Raised by the handler."""


class Storm:
    """Interrupts of the main thread. `last`: done by the handler once, instead of raising."""

    def __init__(self, choices: random.Random, count: Callable[[], None]) -> None:
        self._choices, self._count = choices, count
        self.raising = False
        self.last: Callable[[], None] | None = None
        signal.signal(signal.SIGALRM, self._handle)

    def on(self) -> None:
        self.raising = True
        self._next()

    def off(self) -> None:
        self.raising = False

    def _next(self) -> None:
        signal.setitimer(
            signal.ITIMER_REAL, self._choices.uniform(*_EVERY_S) * self._choices.choice((1, 1, 5))
        )

    def _handle(self, *_: object) -> None:
        if not self.raising:
            return
        self._count()
        if (last := self.last) is not None:
            self.last = None
            self.raising = False
            last()
            return
        self._next()
        raise Interrupt

    @contextlib.contextmanager
    def calm(self):
        """No interrupts in between."""
        was, self.raising = self.raising, False
        try:
            yield
        finally:
            self.raising = was
            if was:
                self._next()


def run_in_loop(main: Coroutine[Any, Any, None]) -> None:
    """Like asyncio.run, except that its end waits for no task for ever.

    An interrupt between two lines of the event loop itself loses a wake-up, and the task that it was for
    never ends: asyncio's own, and its reason to handle SIGINT without raising.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        try:
            # the interrupted loop may still be told to stop, and does so at once
            with contextlib.suppress(RuntimeError):
                if left := asyncio.all_tasks(loop):
                    for task in left:
                        task.cancel()
                    loop.run_until_complete(asyncio.wait(left, timeout=_LOST_S))
                loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), _LOST_S))
        finally:
            loop.close()


class ConsumerRole:
    """One incarnation, which reads in one way."""

    def __init__(
        self, bridge: str, way: str, life: int, log: ConsumerLog, pattern: Pattern, plant: bool
    ) -> None:
        self._random = random.Random(f"{pattern.seed}/{way}/{life}")
        self._log, self._reader, self._plant = log, Reader(log, pattern), plant
        self._consumer = shmbridge.Consumer(bridge, lanes=64)
        self._storm = Storm(self._random, self._count)
        name, _, rest = way.partition(" ")
        self._options = rest.split()
        self._take: Callable[[], None] = getattr(self, "_" + name)

    def _count(self) -> None:
        self._log.words[RAISED] += 1

    def run(self) -> None:
        """Reads until its time is over, then ends in some way."""
        end = self._random.choice(
            (
                "close",
                "close",
                "storm",
                "raise",
                "exit",
                "kill",
                "closing handler",
                "closing handler that raises",
            )
        )
        until_s = time.monotonic() + self._random.uniform(*_LIFE_S)
        try:
            try:
                self._read_until(until_s, end)
            finally:
                self._storm.raising = False  # no call: a handler cannot come in between
        except Interrupt:
            pass
        self._consumer.close()

    def _read_until(self, until_s: float, end: str) -> None:
        with contextlib.suppress(Interrupt, SystemExit, shmbridge.ShmBridgeError), self._consumer as consumer:
            self._storm.on()
            while time.monotonic() < until_s and not self._log.full:
                with contextlib.suppress(Interrupt, shmbridge.ConsumerEmpty):
                    self._take()
                if self._random.random() < 0.2:
                    with contextlib.suppress(Interrupt), self._storm.calm():
                        consumer.take_back_dropped()
            self._end(end)

    def _end(self, how: str) -> None:
        consumer, storm = self._consumer, self._storm
        if how == "close":
            storm.off()
            self._check_books()
            consumer.close()
        elif how == "storm":
            consumer.close()
        elif how == "raise":
            raise Interrupt
        else:
            storm.last = {
                "exit": lambda: sys.exit(0),
                "kill": self._die,
                "closing handler": consumer.close,
                "closing handler that raises": self._close_and_raise,
            }[how]
            with contextlib.suppress(shmbridge.Closed):
                while storm.last is not None:  # until the handler has come
                    with contextlib.suppress(shmbridge.ConsumerEmpty):
                        self._take()

    def _die(self) -> None:
        self._log.words[ConsumerLog.STEP] = ENDED_BY_ITSELF
        os.kill(os.getpid(), signal.SIGKILL)

    def _close_and_raise(self) -> None:
        self._consumer.close()
        raise Interrupt

    def _check_books(self) -> None:
        """Checks, without interrupts, that every taken record is released, held or discarded."""
        gc.collect()
        stats = self._consumer.stats()
        left = stats["records_total"] - stats["released_total"] - stats["held"] - stats["discarded_total"]
        if left:
            raise AssertionError(f"the books of a consumer do not balance: {left} records, {stats}")

    # -- ways
    # --------------------------------------------------------------------------------------------------------

    def _body(self, record: Any) -> None:
        self._reader.note(record)
        if self._plant and self._random.random() < 0.001:
            record.release()  # the planted error: a release that no log has
            return
        self._reader.giving_back(record)
        record.release()

    def _get(self) -> None:
        for _ in range(20):
            if self._random.random() < 0.5:
                self._body(self._consumer.get(_TIMEOUT_S))
            else:
                with self._consumer.get(_TIMEOUT_S) as record:
                    self._reader.note(record)
                    self._reader.giving_back(record)

    def _poll(self) -> None:
        records = self._consumer.poll(self._random.choice((1, 8, 64)))
        if not records:
            time.sleep(0.001)
        for record in records:
            self._body(record)

    def _for(self) -> None:
        left = 50
        for record in self._consumer:
            self._reader.note(record)
            self._reader.giving_back(record)  # by the next step
            left -= 1
            if not left:
                record.release()
                break

    def _get_async(self) -> None:
        async def take() -> None:
            for _ in range(20):
                self._body(await self._consumer.get_async(_TIMEOUT_S))

        run_in_loop(take())

    def _async_for(self) -> None:
        async def take() -> None:
            left = 50
            async for record in self._consumer:
                self._reader.note(record)
                self._reader.giving_back(record)
                left -= 1
                if not left:
                    record.release()
                    break

        run_in_loop(take())

    def _batches(self) -> None:
        hold, prefetch = self._options
        layout = self._random.choice(("packed", "padded"))
        left = 12
        for batch in self._consumer.batches(
            groups=GROUPS, layout=layout, hold=hold, prefetch=int(prefetch), timeout_s=0.1
        ):
            assert len(batch.groups) == GROUPS
            if hold == "gather":
                for meta in batch.meta:
                    self._reader.note_meta(meta)
            else:
                for record in batch.records:
                    self._reader.note(record)
                for record in batch.records:
                    self._reader.giving_back(record)
            left -= 1
            if hold == "caller" or not left:
                batch.release()
            if not left:
                break

    def _take_groups(self) -> None:
        groups = self._consumer.take_groups(groups=GROUPS, timeout_s=0.1)
        if groups is None:
            return
        assert len(groups) == GROUPS
        if self._random.random() < 0.2:
            self._consumer.put_back(groups)
            return
        for group in groups:
            for record in group.records:
                self._body(record)


WAYS = (
    "get",
    "poll",
    "for",
    "get_async",
    "async_for",
    "batches step 0",
    "batches step 1",
    "batches caller 0",
    "batches caller 1",
    "batches gather 0",
    "batches gather 1",
    "take_groups",
)


def consume(bridge: str, way: str, life: int, log: ConsumerLog, pattern: Pattern, plant: bool) -> None:
    """Reads in one way, interrupted at random, and ends."""
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda *_: None  # an interrupt in a destructor is said there
    ConsumerRole(bridge, way, life, log, pattern, plant).run()


class InterruptedProducer(ProducerRole):
    """Puts and claims while it is interrupted; each time it looks up what was committed."""

    def put_interrupted(self) -> None:
        """Until it is told to quit."""
        words = self._words
        storm = Storm(self._random, lambda: None)
        words[ProducerWords.STATE] = State.RUNNING
        while words[ProducerWords.ORDER] != Order.QUIT:
            try:
                try:
                    storm.on()
                    for _ in range(50):
                        self._random.choice((self._put, self._claim, self._give_claim_up))()
                finally:
                    storm.raising = False  # no call: a handler cannot come in between
            except Interrupt:
                pass
            self._look_up()
            self._put()  # after any interrupt this put succeeds
        self._producer.close()
        words[ProducerWords.STATE] = State.CLOSED

    def _look_up(self) -> None:
        committed = int(self._producer.stats()["records_total"])
        if not self._words[ProducerWords.RETURNED] <= committed <= self._words[ProducerWords.STARTED]:
            words = self._words.tolist()[:2]
            raise AssertionError(
                f"a producer was told of {words[1]} records, began {words[0]}, and counts {committed}"
            )
        self._next = committed
        self._words[ProducerWords.RETURNED] = committed


def produce_interrupted(
    bridge: str, number: int, words: memoryview, pattern: Pattern, _most: int | None
) -> None:
    sys.unraisablehook = lambda *_: None
    InterruptedProducer(bridge, number, words, pattern).put_interrupted()


def consume_calmly(bridge: str, log: ConsumerLog, pattern: Pattern) -> None:
    """The other side of interrupted producers, until it is told to quit."""
    reader = Reader(log, pattern)
    with shmbridge.Consumer(bridge, lanes=64) as consumer:
        while log.words[log.ORDER] & 0xFF != Order.QUIT and not log.full:
            for record in consumer.poll() or [None]:
                if record is None:
                    time.sleep(0.001)
                    continue
                reader.note(record)
                reader.giving_back(record)
                record.release()
