"""A consumer of the fuzz: takes in every way there is, checks every byte, and logs each record before it
releases it.

Knows the public Consumer; knows nothing of who kills it. Runs in a forked child.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

import shmbridge

from .ledger import STATS, ConsumerLog, Kind, Order, number_of
from .pattern import Pattern

_MOST_HELD = 150
_QUIET_S = 0.02


class ConsumerRole:
    """One incarnation."""

    def __init__(self, bridge: str, incarnation: int, log: ConsumerLog, pattern: Pattern) -> None:
        self._random = random.Random(f"{pattern.seed}/consumer/{incarnation}")
        self._log, self._pattern = log, pattern
        self._numbers: dict[str, int] = {}
        self._held: list[tuple[Any, int]] = []  # records with their producer's number
        self._views: list[tuple[np.ndarray, int, int]] = []  # of released records: tokens, number, sequence
        self._consumer = shmbridge.Consumer(bridge, lanes=256)
        log.words[log.READY] = time.monotonic_ns()

    # -- one record after the other
    # -------------------------------------------------------------------------------------------------

    def take_single(self) -> None:
        """get and poll in a mix; releases at once, later, in any order, or with a view that outlives the
        record.
        """
        words, log = self._log.words, self._log
        records: list[Any] = []
        while not log.full:
            order = words[log.ORDER]
            if order >> 8 > words[log.ACKNOWLEDGED]:
                # a record that one still refers to keeps its lane's memory, also after release
                records.clear()
                if self._obey(order & 0xFF):
                    return
                continue
            if order & 0xFF != Order.RUN:
                time.sleep(0.001)
                continue
            records = self._take()
            if not records:
                self._give_back(len(self._held) // 3 + 1)
            self._treat(records)
            if len(self._held) + len(self._views) > _MOST_HELD:
                self._give_back(_MOST_HELD // 2)

    def _take(self) -> list[Any]:
        if self._random.random() < 0.1:
            return self._get(0.02)
        records = self._poll(self._random.choice((1, 4, 16, 64)))
        return records or self._get(0.05)

    def _poll(self, most: int) -> list[Any]:
        self._log.append(Kind.ASKED, 0, most)
        records = self._consumer.poll(most)
        self._note(records)
        return records

    def _get(self, timeout_s: float) -> list[Any]:
        self._log.append(Kind.ASKED, 0, 1)
        try:
            records = [self._consumer.get(timeout_s)]
        except shmbridge.ConsumerEmpty:
            return []
        self._note(records)
        return records

    def _note(self, records: list[Any]) -> None:
        append = self._log.append
        for record in records:
            meta = record.meta
            append(
                Kind.GOT_AGAIN if meta.redelivered else Kind.GOT,
                self._number(meta.producer_id),
                meta.sequence,
            )

    def _number(self, producer_id: str) -> int:
        number = self._numbers.get(producer_id)
        if number is None:
            number = self._numbers[producer_id] = number_of(producer_id)
        return number

    def _treat(self, records: list[Any]) -> None:
        how = self._random.random()
        if how < 0.1:
            records.reverse()
        for record in records:
            number = self._number(record.meta.producer_id)
            self._check(record, number)
            if how < 0.8:
                self._release(record, number)
            elif how < 0.93:
                self._held.append((record, number))
            else:
                self._views.append((record["tokens"].values, number, record._sequence))
                record.release()

    def _check(self, record: Any, number: int) -> None:
        if not self._pattern.is_whole(record, number):
            self._log.append(Kind.TORN, number, record._sequence)

    def _release(self, record: Any, number: int) -> None:
        self._log.append(Kind.RELEASING, number, record._sequence)
        record.release()

    def _give_back(self, count: int) -> None:
        """Ends leases in any order, after another look: nothing may have changed under them."""
        self._random.shuffle(self._held)
        for _ in range(min(count, len(self._held))):
            record, number = self._held.pop()
            self._check(record, number)
            self._release(record, number)
        for _ in range(min(count, len(self._views))):
            view, number, sequence = self._views.pop()
            if view.tobytes() != self._pattern.token_bytes(number, sequence):
                self._log.append(Kind.TORN, number, sequence)
            self._log.append(Kind.RELEASING, number, sequence)
            del view

    # -- batches
    # --------------------------------------------------------------------------------------------------------

    def take_batches(self, groups: int) -> None:
        """Until it is killed."""
        log = self._log
        log.append(Kind.ASKED_BATCHES, 0, 2 * groups)
        layout = self._random.choice(("packed", "padded"))
        for batch in self._consumer.batches(groups=groups, layout=layout, hold="step"):
            self._note(batch.records)
            records = [(record, self._number(record.meta.producer_id)) for record in batch.records]
            for record, number in records:
                self._check(record, number)
            self._check_gathered(batch, records)
            for record, number in records:
                log.append(Kind.RELEASING_MANY, number, record._sequence)
            del record
            if self._random.random() < 0.5:
                batch.release()
                log.append(Kind.NOTE, 0, 0)
            if log.full:
                return

    def _check_gathered(self, batch: Any, records: list[tuple[Any, int]]) -> None:
        wanted = b"".join(self._pattern.token_bytes(number, record._sequence) for record, number in records)
        tokens = batch.tokens
        if batch.layout == "padded":
            tokens = tokens[np.arange(tokens.shape[1]) < batch.lengths[:, None]]
        if tokens.tobytes() != wanted:
            self._log.append(Kind.TORN, records[0][1], records[0][0]._sequence)

    # -- orders
    # --------------------------------------------------------------------------------------------------------

    def _obey(self, order: int) -> bool:
        """Whether to end."""
        if order == Order.HOLD:
            self._drain()
            self._count()
        elif order == Order.PROBE:
            self._probe()
        elif order == Order.QUIT:
            self._drain()
            self._count()
            self._consumer.close()
        self._log.acknowledge()
        return order == Order.QUIT

    def _drain(self) -> None:
        """Takes and gives back everything, then waits for the dead lanes to be removed."""
        while records := self._poll(64) or self._get(_QUIET_S):
            self._treat(records)
            self._give_back(_MOST_HELD)
        self._give_back(_MOST_HELD * 2)
        deadline = time.monotonic() + 5
        while self._consumer.stats()["lanes_dead"] and time.monotonic() < deadline:
            time.sleep(0.002)

    def _count(self) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        seen = {
            **self._consumer.stats(),
            "fds": len(os.listdir("/proc/self/fd")),
            "maps": len(maps),
            "segment_maps": sum("/shmbridge." in line for line in maps),
        }
        for place, name in enumerate(STATS):
            self._log.append(Kind.STAT, place, int(seen[name]))

    def _probe(self) -> None:
        """Holds one record of a producer that is about to die, to time when the death is seen and the last
        lease ends.
        """
        words, log = self._log.words, self._log
        records = self._get(5.0)
        live = self._consumer.stats()["lanes_live"]
        words[log.STEP] = 1
        deadline = time.monotonic() + 6
        while self._consumer.stats()["lanes_live"] >= live and time.monotonic() < deadline:
            time.sleep(0.0001)
        words[log.TIME_SEEN] = time.monotonic_ns()
        time.sleep(self._random.uniform(0.0, 0.1))  # at any phase of periodic checks
        for record in records:
            self._log.append(Kind.RELEASING, self._number(record.meta.producer_id), record._sequence)
            words[log.TIME_RELEASED] = time.monotonic_ns()
            record.release()
        log.append(Kind.NOTE, 0, 0)


def consume(bridge: str, incarnation: int, log: ConsumerLog, pattern: Pattern, groups: int) -> None:
    """Batches of `groups` until the kill; 0: one record after the other, and orders are obeyed.

    A full log ends it, as a crash would.
    """
    role = ConsumerRole(bridge, incarnation, log, pattern)
    if groups:
        role.take_batches(groups)
    else:
        role.take_single()
