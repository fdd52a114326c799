"""The gateway's consumer: forms batches, tracks those in delivery, and redelivers lost ones. A batch is in
delivery from the time it is handed to a response until that response is proven read; then its records are
released. A batch that was not read is handed out next, as the same bytes. For one thread: the hub's.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from shmbridge import Consumer, ConsumerTaken, Run, ShmBridgeError, list_bridges
from shmbridge.consumers.gateway.bodies import encoded_batch, served
from shmbridge.consumers.gateway.environments import StateFile
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.errors import Discard
from shmbridge.record import Group

log = logging.getLogger(__name__)

_DRY_S, _STUCK_S = 2.0, 1.5


class NotRegistered(Exception):
    """No training run is registered here."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in delivery: its number, used to report the outcome, and its body."""

    number: int
    body: bytes


class Taker:
    """The consumer of one bridge, once there is a run; raises as Consumer."""

    extras = True

    def __init__(self, options: GatewayOptions, state: StateFile, posts_wait: Callable[[], bool]) -> None:
        self._options, self._state, self._posts_wait = options, state, posts_wait
        self.consumer: Consumer | None = None
        self.run: Run | None = None
        self._inherited = False  # the run was announced to an earlier gateway
        self._out: dict[int, list[Group]] = {}
        self._again: list[int] = []
        self._numbers = itertools.count()
        self._dry_since = 0.0
        self._latest: dict[str, Any] | None = None
        self.counts = {
            "batches_total": 0,
            "batches_redelivered_total": 0,
            "batches_read_total": 0,
            "groups_discarded_total": 0,
        }

    # -- who trains

    def restore(self) -> None:
        """Continues the run of an earlier gateway, if any; another process may be the hub by now."""
        saved = self._state.saved
        if saved.run is None:
            return
        self.run, self._inherited = msgspec.structs.replace(saved.run, starting_step=saved.step), True
        try:
            self._become_hub()
        except ConsumerTaken as taken:
            log.warning("batches are not served here: %s", taken)

    def register(self, run: Run) -> None:
        """Announces a run, unless there is one. An earlier gateway's run gives way to a new one."""
        if self.run is not None and not self._inherited:
            return
        # the same trainer, or another process of it
        if self.run is not None and self._state.saved.run == run:
            self._become_hub()
            self._inherited = False
            return
        before, self.run = self.run, run
        try:
            self._become_hub()
        except ShmBridgeError:
            self.run = before
            raise
        self._inherited = False
        if self.consumer is not None and self.consumer.run != run:
            self.consumer.announce_run(run)
        self._state.update(run=run, step=run.starting_step)

    def _become_hub(self) -> Consumer:
        if self.consumer is None:
            self.consumer = self._open(self.run, "redeliver")
        return self.consumer

    def _open(self, run: Run | None, resume: Any) -> Consumer:
        return open_hub(self._options, run, resume=resume, policy=self._options.policy)

    def step(self) -> int:
        """Returns the trainer's step: batches handed out since the run's first step."""
        return self._become_hub().current_step

    def look(self) -> None:
        """Adopts a new lane, so that its records count as queued."""
        if self.consumer is not None:
            self.consumer.poll(0)  # adopts lanes and takes no records

    # -- batches

    def next_batch(self, gzip: bool, gone: Callable[[], bool] = lambda: False) -> Batch | None:
        """Returns the batch to hand out, or None if there is none.

        Blocks briefly only if a post waits for room that a batch would free.

        Args:
            gzip: whether to compress its body.
            gone: returns whether the client has disconnected: then nothing is handed out.

        Raises:
            NotRegistered: no batch size is registered.
            ConsumerTaken: another consumer serves this bridge.
            BatchTooBig: the lanes cannot hold a batch.
        """
        if self.run is None:
            self._check_no_other()
            raise NotRegistered
        self._become_hub()
        if gone():
            return None
        while (found := self._next()) is not None:
            number, counter = found
            try:
                body = encoded_batch(self._out[number], extras=self.extras, gzip=gzip)
            except Exception:
                if self._undo_unreadable(number):
                    continue
                self.lost(number)
                raise
            self.counts[counter] += 1
            if gone():
                self.lost(number)
                return None
            return Batch(number, body)
        return None

    def _next(self) -> tuple[int, str] | None:
        """Returns the number of the next batch, now in delivery, and its counter; None without a batch."""
        if self._again:
            return heapq.heappop(self._again), "batches_redelivered_total"
        groups = self._form()
        if groups is None:
            return None
        number = next(self._numbers)
        self._out[number] = groups
        self._remember_step()
        return number, "batches_total"

    def _undo_unreadable(self, number: int) -> bool:
        """Discards a batch's unreadable groups, puts the others back; returns whether there were any."""
        groups = self._out[number]
        wrong = {place: why for place, group in enumerate(groups) if (why := self._fault(group))}
        if not wrong:
            return False
        del self._out[number]
        for place, why in wrong.items():
            group = groups[place]
            log.error("group %s of %s is discarded: %s", group.group_id, group.producer_id, why)
            group.discard(Discard.CORRUPT)
        self.counts["groups_discarded_total"] += len(wrong)
        self._put_back([group for place, group in enumerate(groups) if place not in wrong])
        self._remember_step()
        return True

    def _fault(self, group: Group) -> str:
        """Returns why a group cannot be served; "" if it can."""
        try:
            encoded_batch([group], extras=self.extras, gzip=False)
        except MemoryError:
            return ""
        except Exception as wrong:
            return str(wrong) or repr(wrong)
        return ""

    def _put_back(self, groups: list[Group]) -> None:
        """Puts the remaining groups of an undone batch back, before all others."""
        consumer = self._become_hub()
        consumer.put_back(groups)
        consumer.queue.count_batch(-1)

    def _form(self) -> list[Group] | None:
        consumer, rows = self._become_hub(), max(1, self.run.batch_size if self.run is not None else 1)
        groups = consumer.take_groups(rows=rows, split=self._options.split)
        now = time.monotonic()
        if groups is not None or not self._dry_since:
            self._dry_since = 0.0 if groups is not None else now
        elif now - self._dry_since > _DRY_S and self._posts_wait():
            self._dry_since = now
            # raises if it can never succeed
            groups = consumer.take_groups(rows=rows, timeout_s=_STUCK_S, split=self._options.split)
        if groups is not None:
            self._latest = None
        return groups

    def _check_no_other(self) -> None:
        if self.consumer is not None:
            return
        for bridge in list_bridges():
            if bridge.name == self._options.bridge and bridge.consumer_pid is not None:
                raise ConsumerTaken(
                    f"bridge {bridge.name!r} has a living consumer: pid {bridge.consumer_pid}",
                    hint="it takes all groups, also those that are posted here; end it to poll /batch",
                )

    def proven(self, number: int) -> None:
        """Releases the records of a batch that was read."""
        groups = self._out.pop(number, None)
        if groups is None:  # reset() came first
            return
        self.counts["batches_read_total"] += 1
        self._release(groups)
        self._remember_step()

    def _release(self, groups: list[Group]) -> None:
        for group in groups:
            for record in group.records:
                record.release()

    def lost(self, number: int) -> None:
        """Puts a batch that was not read back, before all others."""
        if number in self._out:
            heapq.heappush(self._again, number)

    def _remember_step(self) -> None:
        self._state.update(step=self.step() - len(self._out))

    def latest(self) -> dict[str, Any] | None:
        """Returns the last group of the batches in delivery; None if there is none."""
        if self._out:
            self._latest = self._shown(self._out[max(self._out)][-1])
        return self._latest

    def _shown(self, group: Group) -> dict[str, Any] | None:
        """Returns the group as an example, or the last one if it cannot be read."""
        try:
            return served(group, extras=self.extras)
        except Exception as wrong:
            log.error("group %s of %s cannot be shown: %s", group.group_id, group.producer_id, wrong)
            return self._latest

    # -- the end

    def reset(self) -> int:
        """Clears the run; discards, counts and returns the number of all groups not proven read."""
        self._check_no_other()  # another consumer's records are not ours to discard
        consumer = self.consumer or self._open(None, "redeliver")
        self.run, self._inherited, self._latest, self.consumer = None, False, None, None
        held = [group for groups in self._out.values() for group in groups] + self._held()
        self._out.clear()
        self._again.clear()
        for group in held:
            group.discard(Discard.RESUME)
        discarded = len(held) + consumer.queue.groups()
        consumer.close()
        self._open(None, "discard").close()
        self.counts["groups_discarded_total"] += discarded
        return discarded

    def _held(self) -> list[Group]:
        """Returns groups taken from lanes that are in no batch in delivery."""
        return []

    def close(self) -> None:
        """Closes the bridge; batches in delivery are redelivered by the next gateway."""
        if self.consumer is not None:
            for groups in self._out.values():
                for group in groups:
                    group.abandon()
            self._out.clear()
            self.consumer.close()
            self.consumer = None

    def stats(self) -> dict[str, float]:
        """Returns this object's and the consumer's counters. Any thread."""
        own = {**self.counts, "batches_out": len(self._out), "batches_to_serve_again": len(self._again)}
        consumer = self.consumer
        bridge = {} if consumer is None else consumer.stats()
        return own | {f"bridge_{key}": value for key, value in bridge.items()}


def open_hub(options: GatewayOptions, run: Run | None, **more: Any) -> Consumer:
    """Returns the hub of the gateway's bridge; `more` goes to Consumer. Raises as Consumer and Recorder."""
    if options.record is None:
        return Consumer(options.bridge, run, lanes=options.lanes, **more)
    from shmbridge.archive.recorder import Recorder

    tap = Recorder(options.record)
    try:
        return Consumer(options.bridge, run, lanes=options.lanes, tap=tap, **more)
    except BaseException:
        tap.close()
        raise
