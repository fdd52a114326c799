"""A hub that serves ranks, and a rank, of the fuzz.

They know nothing of who kills them, and run in forked children.
"""

import random
import time
from typing import Any, NamedTuple

import shmbridge

from .ledger import ConsumerLog, Order
from .pattern import Pattern
from .reader import Reader

WORLD = 2
MOVED = ConsumerLog.TIME_SEEN  # the word that counts shares that came after later ones: a dead rank's
_MOST_HELD = 2
_NO_SHARE_S = 0.05


class Modes(NamedTuple):
    """A pair of modes of Consumer.serve_ranks."""

    mode: str
    dead_rank: str

    def __str__(self) -> str:
        return f"{self.mode}/{self.dead_rank}"


PAIRS = tuple(Modes(mode, dead_rank) for mode in ("sharded", "broadcast") for dead_rank in ("wait", "spread"))


def serve(bridge: str, modes: Modes, groups: int, prefetch: int, log: ConsumerLog) -> None:
    """Serves until it is told to quit; then ends when all is done."""
    with shmbridge.Consumer(bridge, lanes=256) as consumer:
        server = consumer.serve_ranks(
            WORLD, groups=groups, mode=modes.mode, dead_rank=modes.dead_rank, prefetch=prefetch
        )
        while log.words[log.ORDER] & 0xFF != Order.QUIT:
            time.sleep(0.005)
        consumer.drain()
        if not server.wait(60):
            raise TimeoutError(
                f"the bridge is drained, and not every share was done within 60 s: {server.stats()}"
            )


def read(bridge: str, rank: int, incarnation: int, log: ConsumerLog, pattern: Pattern) -> None:
    """Reads shares in every way there is, until there are no more."""
    RankRole(bridge, rank, incarnation, log, pattern).read()


class RankRole:
    """One incarnation of one rank."""

    def __init__(self, bridge: str, rank: int, incarnation: int, log: ConsumerLog, pattern: Pattern) -> None:
        self._random = random.Random(f"{pattern.seed}/rank/{rank}/{incarnation}")
        self._log, self._reader = log, Reader(log, pattern)
        self._rank = shmbridge.Rank(bridge, rank, WORLD)
        self._held: list[Any] = []
        self._last = 0, -1  # epoch and step of the share before

    def read(self) -> None:
        with self._rank:
            while not self._log.full:
                try:
                    share = self._rank.next_share(_NO_SHARE_S)
                except (shmbridge.ConsumerEmpty, shmbridge.NoConsumer):
                    self._give_back(len(self._held))
                    self._rank.report_done()
                    continue
                if share is None:
                    break
                this = share.manifest.epoch, share.manifest.step
                self._log.words[MOVED] += this[0] == self._last[0] and this[1] <= self._last[1]
                self._last = this
                for record in share.records:
                    self._reader.note(record)
                    del record
                self._treat(share)
                del share
                if len(self._held) > self._random.randrange(_MOST_HELD + 1):
                    self._give_back(1)
            self._give_back(len(self._held))

    def _treat(self, share: Any) -> None:
        how = self._random.random()
        if how < 0.3:
            self._held.append(share)
        elif how < 0.6:
            self._end(share)
            self._rank.report_done()
        elif how < 0.8:
            self._end(share)
        else:
            batch = self._rank.gather(share)
            for record in share.records:
                self._reader.giving_back(record)
                del record
            batch.release()

    def _give_back(self, count: int) -> None:
        for _ in range(count):
            self._end(self._held.pop(0))

    def _end(self, share: Any) -> None:
        for record in share.records:
            self._reader.compare(record)
            self._reader.giving_back(record)
            del record
        share.release()
