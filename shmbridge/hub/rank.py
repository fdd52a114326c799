"""A learner rank: reads its share of every batch in place, in the lanes themselves.

The hub assigns the shares (hub/ranks.py). A rank writes to no lane. Why its memory does not change while
it reads, even when the hub dies: docs/adr/0002-ranks.md.
"""

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Never, Self, TypeVar

from shmbridge._ext import header
from shmbridge._ext.lane import CrashNote, Drops, RankReader, Waits
from shmbridge.batch import Batch, Hold, Layout, unreadable
from shmbridge.config import check_bridge_name, check_choice, check_count, deadline_of
from shmbridge.control import messages
from shmbridge.errors import (
    Closed,
    ConsumerEmpty,
    LaneQuarantined,
    NoConsumer,
    RankTaken,
    counted,
    unknown_argument,
)
from shmbridge.hub.batches import Batches, Steps
from shmbridge.record import Call, Group, Lane, Record, lane_name, say_lost
from shmbridge.schema import Columns
from shmbridge.segments import (
    MOST_RANKS,
    LockByte,
    OneProcess,
    at_exit,
    control_name,
    in_another_thread,
    is_locked,
    join_epoch,
    leave_bridge,
    leave_epoch,
    lock_after,
    open_control,
    open_mapping,
)
from shmbridge.watch.long_wait import LongWait

if TYPE_CHECKING:
    from shmbridge.control.messages import Manifest

Made = TypeVar("Made")
Looks = list[tuple[RankReader, int]]  # reader, number of the look


class RankShare:
    """One rank's share of one batch: `groups` of records held in place, and the `manifest` that named them.

    A context manager, which releases the share unless it is left by an exception. The rank reports it done
    once all its records are released and no view of them is left. A share dropped without release comes again
    from next_share if it was not read; else see Rank.take_back_dropped.
    """

    def __init__(self, manifest: "Manifest", groups: list[Group]) -> None:
        self.manifest, self.groups = manifest, groups

    @property
    def records(self) -> list[Record]:
        """The records of all groups, in order."""
        return [record for group in self.groups for record in group.records]

    def hand_out(self) -> None:
        """Marks every record as looked at."""
        for record in self.records:
            record._looked_at = True

    def release(self) -> None:
        """Releases every record. Idempotent."""
        for record in self.records:
            record.release()

    def __repr__(self) -> str:
        records = self.records
        state = "; released" if records and all(record.is_released for record in records) else ""
        said = f"{len(self.groups)} groups, {len(records)} records"
        return f"<RankShare {self.manifest.number} of rank {self.manifest.rank}: {said}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()


def lost_of(held: Looks) -> list[bool | None]:
    """Returns per un-released lease None while it lives, else whether its record was looked at."""
    return [reader.lost(look) for reader, look in held if reader.holds(look)]


def is_open(held: Looks, *, of_this_hub: bool) -> bool:
    """Returns whether a lease was not released yet, or a view of its record lives.

    Records dropped from an earlier hub do not count: the present hub hands them out again.
    """
    return any(reader.holds(look) and (of_this_hub or reader.lost(look) is None) for reader, look in held)


def own_look(gather: Callable[[list[Group], Layout], Made], groups: list[Group], layout: Layout) -> Made:
    """Returns what `gather` makes of the groups.

    Its reads do not count as the user looking at the records, also when it is interrupted.
    """
    records = [record for group in groups for record in group.records]
    before = [record._looked_at for record in records]
    try:
        return gather(groups, layout)
    finally:
        for record, looked_at in zip(records, before, strict=True):
            record._looked_at = looked_at


log = logging.getLogger(__name__)

_Held = tuple["Manifest", Looks]
_ASK_S, _RETRY_S = 1.0, 0.02


class Rank(OneProcess):
    """One of `world_size` learner ranks of a bridge; a context manager. For one thread at a time.

    The hub is a Consumer that called serve_ranks, in this process or another. Construction does not wait for
    it.

    Args:
        bridge: name of the bridge.
        rank: 0 to world_size - 1, as in torch.distributed.
        world_size: as in the hub's serve_ranks.

    Attributes:
        bridge, rank, world_size: as given.

    Raises:
        RankTaken: a living process is this rank already.
        ValueError: rank or world_size is out of range.
        BadBridgeName, ShmPermission, ShmTooSmall, ShmUnavailable, ProcessLimit, NotReady, LayoutMismatch.
    """

    def __init__(self, bridge: str, rank: int, world_size: int) -> None:
        from shmbridge.control.server import ControlClient

        world_size = check_count("world_size", world_size, 1, MOST_RANKS)
        rank = check_count(f"world_size={world_size}, rank", rank, 0, world_size - 1)
        self.bridge, self.rank, self.world_size = check_bridge_name(bridge), rank, world_size
        self._control_words: header.Control | None = open_control(bridge)
        # No shared word names the lock's holder.
        if not lock_after(lambda: 0, self._control.mapping.fd, LockByte.FIRST_RANK + rank):
            leave_bridge(self._control.mapping.fd, bridge)
            raise RankTaken(
                f"rank {rank} of bridge {bridge!r} is taken by a living process",
                hint="give every process a rank of its own; who is on the bridge: fuser -v "
                f"/dev/shm{control_name(bridge)}",
            )
        header.fault(b"rank.locked")
        try:
            self._client = ControlClient(
                bridge, role="rank", name=f"rank {rank} of {world_size}, pid {os.getpid()}"
            )
        except BaseException:
            leave_bridge(self._control.mapping.fd, bridge)
            raise
        self._member = time.monotonic_ns()  # taken under the lock: larger than any predecessor's
        self._epoch = 0
        self._after = -1
        self._open: list[_Held] = []  # shares read, whose end was not reported to the hub
        # epoch and number of the shares whose step neither ended nor failed -> the keys of their groups
        self._begun: dict[tuple[int, int], list[str]] = {}
        self._crash: CrashNote | None = None
        self._epochs: set[int] = set()  # epochs whose lock is held
        self._lanes: dict[str, RankReader] = {}
        self._drops, self._drops_seen = Drops(), 0
        self._totals = dict.fromkeys(
            ("shares", "records", "tokens", "reissued", "outdated", "unreadable_groups"), 0
        )
        self._wait_s = 0.0
        self._waits = Waits()
        self._long_wait = LongWait(bridge, f"rank {rank} of {world_size}, bridge {bridge!r}")
        self._no_exit_call = at_exit(self.close)

    @property
    def _control(self) -> header.Control:
        if self._control_words is None or self._control_words.mapping.forked:
            raise Closed(
                f"rank {self.rank} of bridge {self.bridge!r} is closed, or belongs to the process before fork"
            )
        return self._control_words

    # -- reading

    def batches(
        self,
        layout: Layout = "packed",
        timeout_s: float | None = None,
        hold: Hold = "step",
        whole_rows: bool = False,
        **unknown: Never,
    ) -> Batches:
        """Yields this rank's share of every batch, in the form of Consumer.batches, until the bridge is
        drained.

        Blocks in `next` until there is a share, at most `timeout_s` seconds; `async for` waits without
        blocking the event loop. `batch.manifest` describes the whole batch.

        Args:
            layout: "packed" (N,) or "padded" (B, T).
            timeout_s: for each batch; None: for ever, also while there is no hub.
            hold: "step" keeps the share until the next iteration, so that the successor of a rank that dies
                gets it again; "caller" until batch.release() only, which needs a hub with prefetch for as
                many; "gather" reports it done once gathered: at most once, unless the hub dies before it is
                told. A `break` releases nothing: leave the loop by `with batch:`.
            whole_rows: `loss_mask` is 1, not 0, in the rows that have neither a mask nor `prompt_length`.

        Raises:
            ConsumerEmpty: no share came in time. NoConsumer: there was no hub. Closed.
            RequestRefused: the hub serves another world_size, or forms no more batches; it says why.
            ValueError: layout or hold has an unknown value; raised at once.
        """
        for name in unknown:
            raise unknown_argument("batches", name, signature(self.batches).parameters)
        check_choice("layout", layout, ("padded", "packed"))
        check_choice("hold", hold, ("step", "gather", "caller"))
        begin = functools.partial(self._iterate, layout, timeout_s, hold, whole_rows)
        return Batches(begin, self, f"rank {self.rank} of {self.bridge!r}")

    def _iterate(
        self, layout: Layout, timeout_s: float | None, hold: Hold, whole_rows: bool, tick_s: float | None
    ) -> Steps:
        until_s = deadline_of(timeout_s)
        while True:
            try:
                if (share := self._share_by(until_s, timeout_s, tick_s)) is None:
                    return
            except (ConsumerEmpty, NoConsumer):
                if tick_s is None or time.monotonic() >= until_s:
                    raise
                yield None
                continue
            until_s = deadline_of(timeout_s)
            batch = self._gather(share, layout)
            if batch is None:
                continue
            if whole_rows:
                batch.train_whole_rows()
            if hold == "gather":
                share.release()
                self.report_done()
            share.hand_out()  # only now: if the batch is lost before, it is gathered again
            yield batch
            if hold != "caller":
                batch.release()
                share.release()
            until_s = deadline_of(timeout_s)

    def _share_by(self, until_s: float, timeout_s: float | None, tick_s: float | None) -> RankShare | None:
        """Returns the next share; None if there are no more. Waits for `tick_s` at most, if that is given."""
        if tick_s is None:
            return self.next_share(timeout_s)
        return self.next_share(max(min(until_s - time.monotonic(), tick_s), 0.0))

    def gather(self, share: RankShare, layout: Layout = "packed") -> Batch | None:
        """Returns a batch of the readable groups of a share, with its manifest; None if none is readable.
        Never blocks.

        The share ends with the batch's release. Unreadable groups are released, counted and logged.
        """
        batch = self._gather(share, layout)
        share.hand_out()
        return batch

    def _gather(self, share: RankShare, layout: Layout) -> Batch | None:
        if not share.groups:  # a feed's step may have fewer groups than there are ranks
            return None
        try:
            batch = own_look(Batch, share.groups, layout)
        except MemoryError:
            raise
        except Exception:
            search = functools.partial(own_look, unreadable, share.groups, layout)
            found = in_another_thread(search)  # in a thread where no signal handler raises
            for group, why in found:
                log.error("group %s of %s is left out: %s", group.group_id, group.producer_id, why)
                for record in group.records:
                    record.release()
            self._totals["unreadable_groups"] += len(found)
            unread = {id(group) for group, _ in found}
            share.groups = [group for group in share.groups if id(group) not in unread]
            if not share.groups:
                return None
            batch = own_look(Batch, share.groups, layout)
        batch.manifest = share.manifest
        return batch

    def next_share(self, timeout_s: float | None = None) -> RankShare | None:
        """Returns the next share, its records held in place; None once the bridge is drained.

        Blocks. First reports finished shares to the hub.

        Raises: as batches.
        """
        deadline, began = deadline_of(timeout_s), time.monotonic()
        try:
            with self.one_wait():
                while True:
                    if self._join():
                        self.report_done()
                        if (lost := self._lost_share()) is not None:
                            return lost
                        answer = self._ask(deadline)
                        if isinstance(answer, messages.NoMoreShares):
                            return None
                        if answer is not None and (share := self._look(answer)) is not None:
                            return share
                    elif self._is_finished():
                        return None
                    else:
                        time.sleep(_RETRY_S)
                    self._say_if_long()
                    if time.monotonic() > deadline:
                        raise self._empty(timeout_s)
        finally:
            self._wait_s += time.monotonic() - began

    def one_wait(self) -> AbstractContextManager[None]:
        """Makes one wait of several calls, for a loop that asks again and again with a short `timeout_s`; see
        Consumer.one_wait.
        """
        return self._waits.open()

    def _say_if_long(self) -> None:
        """Logs what is waited for, unless this process's hub does."""
        if self._control.hub_pid != os.getpid() or not self._control.asking_ns:
            self._long_wait.look(self._waits.since_s, self._late_share)

    def _late_share(self) -> str:
        """Returns what this rank waits for where `inspect` finds no trouble."""
        if not is_locked(self._control.mapping.fd, LockByte.HUB):
            return "no consumer is alive -> start the process that calls Consumer.serve_ranks"
        if self._open:
            return f"it holds {counted(len(self._open), 'share')} of earlier batches itself -> release them"
        fd, others = self._control.mapping.fd, [r for r in range(self.world_size) if r != self.rank]
        gone = [str(rank) for rank in others if not is_locked(fd, LockByte.FIRST_RANK + rank)]
        if gone:
            who, them = ("rank", "it") if len(gone) == 1 else ("ranks", "them")
            return f"it waits for {who} {', '.join(gone)}, not alive -> start {them}"
        return f"it waits for {counted(len(others), 'other rank')} to finish shares of earlier batches"

    def take_back_dropped(self) -> int:
        """Makes next_share hand out again, as `redelivered`, shares that were read and dropped without
        release; returns how many.

        Never blocks; for the rank's thread. Without this call such a share goes to this rank's successor.
        """
        dropped = 0
        for _, held in self._open:
            lost = lost_of(held)
            if True in lost:
                dropped += 1
                for reader, look in held:
                    reader.excuse(look)
        self._drops_seen = -1
        return dropped

    def _lost_share(self) -> RankShare | None:
        """Returns again an unread share whose leases are all gone, some without release."""
        drops = self._drops
        for call, looked_at in drops.take_unsaid():
            say_lost(f"rank {self.rank} of bridge {self.bridge!r}", call, looked_at)
        if self._drops_seen == (now := drops.returned + drops.dropped):
            return None
        in_part = False  # the rest of it is dropped without a countable drop
        for number, (manifest, held) in enumerate(self._open):
            lost = lost_of(held)
            if False not in lost or True in lost or manifest.epoch != self._epoch:
                continue
            if None not in lost:
                return self._look_again(number, manifest, held)
            in_part = True
        if not in_part:
            self._drops_seen = now
        return None

    def _look_again(self, number: int, manifest: "Manifest", held: Looks) -> RankShare:
        """Leases the un-released records of an open share again."""
        groups, kept = [], []
        looks = iter(held)
        for places in manifest.groups:
            group = Group(places.size, time.monotonic())
            for place in places.records:
                reader, look = next(looks)
                if reader.holds(look):
                    record = reader.look(Record, place.slot, place.sequence, place.generation, True)
                    record._handed_out_by = Call.RANK
                    kept.append((reader, record._look))
                    group.append(record)
            if group.records:
                groups.append(group)
        self._open[number] = (manifest, kept)  # first: a record lost from here on is known to be open
        for reader, look in held:
            reader.forget(look)
        return RankShare(manifest, groups)

    def report_done(self) -> None:
        """Reports to the hub the shares that are no longer read. next_share does so itself; call it during a
        long step.

        Blocks for an answer, at most a second; unreported shares are reported next time.
        """
        ended = [
            (manifest, held)
            for manifest, held in self._open
            if not is_open(held, of_this_hub=manifest.epoch == self._epoch)
        ]
        numbers = [manifest.number for manifest, _ in ended if manifest.epoch == self._epoch]
        if (
            numbers
            and self._request(messages.SharesDone(self.rank, self._member, self._epoch, numbers), _ASK_S)
            is None
        ):
            return
        header.fault(b"rank.told_done")
        self._note_begun(over=[(manifest.epoch, manifest.number) for manifest, _ in ended])
        self._open = [each for each in self._open if each not in ended]
        for reader, look in [lease for _, held in ended for lease in held]:
            reader.forget(look)
        self._let_go()

    def report_failed(self, groups: Sequence[Group] = ()) -> None:
        """Reports to a hub's feed that a step failed with these groups of open shares; without any, with all.

        The feed counts that, and finds the group at fault over the next runs. Call it for an error that data
        may have caused, before this process ends by it; a share counts once. Blocks for an answer, at most a
        second.
        """
        at_fault = {(lane_name(record), record._sequence) for group in groups for record in group.records}
        failed = {}
        for manifest, held in self._open:
            begun = (self._epoch, manifest.number) in self._begun
            if manifest.epoch == self._epoch and begun and is_open(held, of_this_hub=True):
                places = [
                    place
                    for place, group in enumerate(manifest.groups)
                    if at_fault & {(manifest.lanes[each.lane], each.sequence) for each in group.records}
                ]
                if places or not groups:
                    failed[manifest.number] = places
        if failed:
            self._note_begun(over=[(self._epoch, number) for number in failed])
            self._request(messages.SharesDone(self.rank, self._member, self._epoch, [], failed), _ASK_S)

    def note_crashes(self, folder: str | Path) -> None:
        """Has a crash of this process counted as a failure of the groups that it reads then.

        Args:
            folder: `set_aside` of the run directory of the hub's feed, which reads there what it is to count
                when it opens the next time; the feed's own process needs no note.
        """
        self._crash = CrashNote(os.fsencode(Path(folder).absolute() / "crash"))

    def _note_begun(self, *, over: Iterable[tuple[int, int]] = ()) -> None:
        for share in over:
            self._begun.pop(share, None)
        if self._crash is not None:
            keys = [key for keys in self._begun.values() for key in keys]
            self._crash.set(json.dumps(keys).encode() if keys else b"")

    def _let_go(self) -> None:
        """Frees locks of earlier epochs and lanes of dead producers that no held record needs."""
        for epoch in self._epochs - {self._epoch, *(manifest.epoch for manifest, _ in self._open)}:
            leave_epoch(self._control, epoch)
            self._epochs.discard(epoch)
        for name, reader in list(self._lanes.items()):
            if reader.held == 0 and not is_locked(reader.lane.fd, LockByte.PRODUCER):
                del self._lanes[name]

    def _join(self) -> bool:
        """Joins the present hub's epoch, if the hub is alive.

        Records still held from an earlier epoch keep that epoch's lock.
        """
        control = self._control
        if self._epoch != control.hub_epoch:
            self._epoch = join_epoch(control)
            self._epochs.add(self._epoch)
            header.fault(b"rank.joined")
            self._after = -1
        return self._epoch > 0 and is_locked(control.mapping.fd, LockByte.HUB)

    def _is_finished(self) -> bool:
        """Returns whether the dead hub had drained the bridge; the next hub clears that with its epoch."""
        return self._epoch > 0 and self._control.finished and self._control.hub_epoch == self._epoch

    def _ask(self, deadline: float) -> "Manifest | messages.NoMoreShares | None":
        question = messages.NextShare(self.rank, self.world_size, self._member, self._epoch, self._after)
        answer = self._request(question, min(_ASK_S, max(deadline - time.monotonic(), 0.001)))
        return answer if isinstance(answer, messages.Manifest | messages.NoMoreShares) else None

    def _request(self, request: messages.Request, timeout_s: float) -> messages.Answer | None:
        """Returns the hub's answer; None if there is none in time, or none yet from this hub."""
        from shmbridge.control.server import RequestRefused

        try:
            return self._client.request(request, timeout_s)
        except NoConsumer:
            return None
        except RequestRefused as refused:
            if refused.reason in (messages.OTHER_EPOCH, messages.NO_RANKS):
                time.sleep(_RETRY_S)
                return None
            raise

    def _look(self, manifest: "Manifest") -> RankShare | None:
        """Opens the records of a manifest; None if its hub is gone, since the present hub repeats them."""
        if manifest.epoch != self._epoch or self._control.hub_epoch != self._epoch:
            self._totals["outdated"] += 1
            return None
        header.fault(b"rank.looking")
        groups, held = [], []
        for places in manifest.groups:
            group = Group(places.size, time.monotonic())
            for place in places.records:
                reader, record = self._look_at(manifest.lanes[place.lane], place, manifest.reissued)
                held.append((reader, record._look))
                group.append(record)
            groups.append(group)
        share = RankShare(manifest, groups)
        # Both or none: on a failure before, the share comes again.
        self._open, self._after = [*self._open, (manifest, held)], manifest.number
        header.fault(b"rank.holding")
        self._begun[manifest.epoch, manifest.number] = [
            f"{group.producer_id} {group.records[0]._sequence}" for group in groups
        ]
        self._note_begun()
        self._totals["shares"] += 1
        self._totals["reissued"] += manifest.reissued
        self._totals["records"] += len(share.records)
        self._totals["tokens"] += sum(group.tokens for group in groups)
        return share

    def _look_at(self, name: str, place: "messages.RecordPlace", reissued: bool) -> tuple[RankReader, Record]:
        try:
            if name not in self._lanes:
                self._lanes[name] = self._open_lane(name)
            reader = self._lanes[name]
            record = reader.look(
                Record, place.slot, place.sequence, place.generation, place.redelivered or reissued
            )
            record._handed_out_by = Call.RANK
        except header.LaneCorrupt as wrong:
            said = f"lane {name} is not what the hub said: {wrong}"
            raise LaneQuarantined(said, hint="see the consumer's log; restart this rank") from None
        return reader, record

    def _open_lane(self, name: str) -> RankReader:
        mapping = open_mapping(name, readonly=True, minimum=header.control_bytes)
        info = None if mapping is None else header.read_lane(mapping)
        if mapping is None or info is None:
            raise header.LaneCorrupt("it is gone")
        reader = RankReader(mapping, self._control.mapping)  # its views keep the locks of this rank
        reader.drops = self._drops
        lane = Lane.of(info, Columns.decode(info["columns"]), name)
        lane.describe_to(reader, info["columns"])
        return reader

    def _empty(self, timeout_s: float | None) -> ConsumerEmpty | NoConsumer:
        if not (self._epoch and is_locked(self._control.mapping.fd, LockByte.HUB)):
            return NoConsumer(
                f"bridge {self.bridge!r} had no consumer for {timeout_s} s",
                hint="start the process that calls Consumer.serve_ranks",
            )
        return ConsumerEmpty(
            f"no share for rank {self.rank} within {timeout_s} s"
            + (
                f"; {dropped} of its shares were dropped without release: take_back_dropped()"
                if (dropped := self._dropped)
                else ""
            ),
            hint="are environments running, and the other ranks? has the consumer called serve_ranks? "
            f"shmbridge inspect {self.bridge}",
        )

    @property
    def _dropped(self) -> int:
        return sum(True in lost_of(held) for _, held in self._open)

    # -- state

    def stats(self) -> dict[str, float]:
        """Counters of this rank, flat. Never blocks."""
        totals = {f"{name}_total": count for name, count in self._totals.items()}
        return {
            **totals,
            "leases_dropped_total": self._drops.dropped,
            "open_shares": len(self._open),
            "wait_s": self._wait_s,
        }

    def close(self) -> None:
        """Leaves; blocks for the hub's answer, at most a second.

        Unfinished shares go to the successor; live views stay valid, and keep this rank's number taken, until
        the last is gone.

        Idempotent; does nothing in a child of fork.
        """
        if self._control_words is None or self._control_words.mapping.forked:
            return
        self._no_exit_call()
        if self._epoch and is_locked(self._control.mapping.fd, LockByte.HUB):
            self.report_done()
        self._client.close()
        if self._crash is not None:
            self._crash.end()
        held = sum(reader.held for reader in self._lanes.values())
        if held == 0:
            leave_bridge(self._control.mapping.fd, self.bridge)
        self._lanes.clear()
        self._open.clear()
        self._control_words = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = (
            "closed" if self._control_words is None else f"epoch {self._epoch}, {len(self._open)} shares open"
        )
        return f"<Rank {self.rank} of {self.world_size} of {self.bridge!r}: {state}>"
