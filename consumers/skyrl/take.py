"""Takes groups from a consumer for an event loop, and holds them until they are trained."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import shmbridge
from shmbridge import Batch, BatchTooBig, ConsumerEmpty
from shmbridge.record import leases

Made = TypeVar("Made")
_LOOK_S = 0.25  # longest wait in the thread at first, so the longest wait for a cancelled call
_LONG_S = 1.0  # after which the thread waits longer at a time, if the trainer is to release nothing:
_ASK_S = 1.5  # longer than the second after which the consumer says that a batch does not fit into the lanes


class RolloutsOver(RuntimeError):
    """The bridge is drained, and holds fewer groups than the trainer asks for; those stay."""


class GroupTaker:
    """Every call of a consumer that takes groups, in one thread of its own: the event loop goes on meanwhile.

    Args:
        consumer: the hub of the bridge; nobody else takes from it.
        max_staleness: groups more versions behind are discarded and counted by the consumer; None: none.
        timeout_s: longest wait of a call; None: for ever.
        is_to_release: whether the trainer, as it stands, will release groups, and what it has of how many;
            None: it always will.
    """

    def __init__(
        self,
        consumer: shmbridge.Consumer,
        *,
        max_staleness: int | None = None,
        timeout_s: float | None = None,
        is_to_release: Callable[[], tuple[bool, str]] | None = None,
    ) -> None:
        self._consumer, self._max_staleness, self._timeout_s = consumer, max_staleness, timeout_s
        self._is_to_release = is_to_release or (lambda: (True, ""))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"shmbridge-{consumer.bridge}")
        self._closing = threading.Event()

    async def take(self, groups: int, make: Callable[[Batch], Made]) -> tuple[Batch, Made]:
        """Returns the next `groups` whole groups as a packed batch, leased, and what `make` makes of it.

        Never blocks the event loop. If `make` raises or the task is cancelled, the groups come again, unread.

        Args:
            groups: number of groups.
            make: called with the batch, in the taker's thread.

        Raises:
            ConsumerEmpty: nothing within `timeout_s`; names the producers that live.
            RolloutsOver: the bridge is drained.
            BatchTooBig: the lanes are full, and the trainer releases nothing before it gets these groups.
        """
        over = threading.Event()
        call = asyncio.get_running_loop().run_in_executor(
            self._thread, functools.partial(self._take, groups, make, over)
        )
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            over.set()
            call.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, call: asyncio.Future[tuple[Batch, Made]]) -> None:
        if not call.cancelled() and call.exception() is None:
            self.give_back(call.result()[0])

    def give_back(self, batch: Batch) -> None:
        """Returns a batch's groups to the bridge, unread: they come before all others. Any thread."""
        batch.records = []
        self._consumer.put_back(batch.groups)

    def _take(self, groups: int, make: Callable[[Batch], Made], over: threading.Event) -> tuple[Batch, Made]:
        """Blocks; in the taker's thread."""
        began_s = time.monotonic()
        with self._consumer.one_wait():
            while not (over.is_set() or self._closing.is_set()):
                waited_s = time.monotonic() - began_s
                look_s = _LOOK_S if waited_s < _LONG_S or self._is_to_release()[0] else _ASK_S
                left_s = math.inf if self._timeout_s is None else self._timeout_s - waited_s
                batches = self._consumer.batches(
                    groups,
                    max_staleness=self._max_staleness,
                    prefetch=0,
                    hold="caller",
                    timeout_s=max(0.0, min(look_s, left_s)),
                )
                try:
                    batch = next(batches, None)
                except BatchTooBig as full:
                    releases, what_it_has = self._is_to_release()
                    if releases:  # by now the trainer has what was handed out as the wait began
                        continue
                    raise BatchTooBig(f"{full.message}; {what_it_has}", hint=full.hint) from None
                except ConsumerEmpty:
                    if left_s <= look_s:
                        raise
                    continue
                if batch is None:
                    break
                self._consumer.queue.count_batch(-1)  # a step is counted once it is trained
                try:
                    return batch, make(batch)
                except BaseException:
                    self.give_back(batch)
                    raise
        raise RolloutsOver(
            f"bridge {self._consumer.bridge!r} is drained or closed and has fewer than {groups} groups "
            "-> let environments run on, or give the trainer fewer steps"
        )

    def close(self) -> None:
        """Ends the calls under way; blocks until the thread has ended. Idempotent."""
        self._closing.set()
        self._thread.shutdown()


class HeldGroups:
    """The batches that were handed to the trainer and are not trained yet, by prompt. Any thread."""

    def __init__(self) -> None:
        self._held: list[tuple[set[str], Batch]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(uids) for uids, _ in self._held)

    def hold(self, uids: Iterable[str], batch: Batch) -> None:
        """Keeps a batch until all of its prompts are trained."""
        with self._lock:
            self._held.append((set(uids), batch))

    def staleness(self, uids: Iterable[str], version: int) -> list[int]:
        """Returns how many versions each held row of these prompts is behind; unstamped rows are left out.

        Never blocks for long.
        """
        wanted = set(uids)
        with self._lock:
            batches = [batch for waiting, batch in self._held if waiting & wanted]
        stamped = [meta.min_policy_version for batch in batches for meta in batch.meta]
        return [max(0, version - each) for each in stamped if each >= 0 and version >= 0]

    def release(self, uids: Iterable[str]) -> int:
        """Releases the batches whose prompts are all trained now; returns how many. Never blocks for long."""
        trained = set(uids)
        with self._lock:
            for waiting, _ in self._held:
                waiting -= trained
            over = [batch for waiting, batch in self._held if not waiting]
            self._held = [each for each in self._held if each[0]]
        for batch in over:
            batch.release()
        return len(over)

    def abandon(self) -> None:
        """Ends all leases without release: the next consumer gets those groups."""
        with self._lock:
            held, self._held = self._held, []
        for _, batch in held:
            abandon(batch)


def abandon(batch: Batch) -> None:
    """Ends the leases of a batch without release. Any thread."""
    leases.abandon(batch.records)
    batch.records = []
