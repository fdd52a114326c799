"""A producer's own lane: made, named, counted, claimed; and the errors of one that takes nothing."""

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from shmbridge import sizing
from shmbridge._ext import header
from shmbridge._ext.header import Mapping
from shmbridge._ext.lane import Claim, LaneWriter
from shmbridge._ext.put import Plan
from shmbridge.config import format_size
from shmbridge.control.messages import Full
from shmbridge.errors import (
    BadArgument,
    ClaimOpen,
    Drop,
    LaneFull,
    LaneRemoved,
    Lost,
    NoColumn,
    NoConsumer,
    NotAdmitted,
    SchemaMismatch,
    ShmBridgeError,
    counted,
    did_you_mean,
    labelled,
    shown,
)
from shmbridge.schema import Columns
from shmbridge.segments import (
    LockByte,
    control_name,
    is_locked,
    lane_header,
    lane_names,
    pid_namespace,
    still_named,
)
from shmbridge.segments import create_lane as new_lane_segment

log = logging.getLogger(__name__)

LOOK_S = 0.4  # seconds between two checks while putting or waiting

# Why a producer can put nothing: what is wrong -> what to do.
_OBSTACLES = {
    "closed": "producer {producer} is closed -> open a new one: Producer(bridge)",
    "forked": "producer {producer} belongs to the process before fork -> open a new one in this process",
    "closed while waiting": "producer {producer} was closed while this group waited for room -> open a new "
    "one: the group is counted in dropped_total",
    "quarantined": "the consumer (pid {pid}) has quarantined the lane of {producer}: its words cannot be true"
    " -> something overwrote shared memory: see the consumer's log, then open a new producer",
    "removed": "lane {lane} of {producer}, or its bridge's control segment, was removed from /dev/shm; "
    "records that no consumer can reach: {records} -> close it and open a new producer; if the user's last "
    "logout did it, set RemoveIPC=no in /etc/systemd/logind.conf",
    "not drained": "not released within {timeout_s} s: {records} records of {producer} -> close(drain=False) "
    "leaves them for the next consumer",
    "claim open": "producer {producer} has an open claim -> put after the `with producer.claim(...)` block",
    "claim over": "the claim is over, committed or given up -> write inside the block, before the close",
    "draining": "the consumer of bridge {bridge!r} is draining it -> the run is over: close the producer",
    "no origin": "record {sequence} is of another node, {producer} has no origin -> open it with origin=",
    "no ticket": "{producer} got no ticket within {timeout_s} s and holds {tickets}; {culprit} -> {hint}",
    "other clock": "{producer} reads a clock that is {ahead_s:.0f} s ahead of its consumer's (pid {pid}): "
    "another time namespace -> run both in one time namespace",
    "tickets": "{producer} holds {tickets} tickets, the most of a lane -> end those of groups that were put",
    "no later consumer": "no consumer will answer {producer}: its lane or the control segment was removed"
    " -> close it and open a new producer",
}


def obstacle(error: type[ShmBridgeError], why: str, **numbers: object) -> ShmBridgeError:
    """Returns the error of a producer that can put nothing."""
    message, hint = (part.format(**numbers) for part in _OBSTACLES[why].split(" -> "))
    return error(message, hint=hint)


def lane_full(
    producer_id: str, control: header.Control, writer: LaneWriter, wanted_bytes: int, waited_s: float
) -> LaneFull:
    """Returns the error of a group for which no room came in time."""
    if not is_locked(control.mapping.fd, LockByte.HUB):
        culprit, hint = "no consumer is alive: waiting for the next one", "start the learner"
    elif control.paused:
        culprit, hint = f"paused by the consumer (pid {control.hub_pid})", "resume the bridge"
    else:
        records = counted(writer.outstanding, "record")
        culprit = f"consumer pid {control.hub_pid} is alive and has not released {records}"
        hint = "the learner is slow or holds leases: raise lane_bytes, or lower what it holds"
        if dropped := writer.leases_dropped:
            culprit += f", {dropped} of them dropped without release"
            hint = "release() records where the consumer's log names the call, or call take_back_dropped()"
    return LaneFull(
        f"lane of {producer_id} has no room for {format_size(wanted_bytes)} after {waited_s:.1f} s "
        f"({format_size(writer.free_bytes)} of {format_size(writer.data_bytes)} free, "
        f"{writer.slot_count - writer.outstanding} of {writer.slot_count} slots); {culprit}",
        hint=hint,
    )


def not_admitted(
    producer_id: str, control: header.Control, answer: object, tickets: int, timeout_s: float | None
) -> ShmBridgeError:
    """Returns the error of a producer that got no ticket in time; a messages.Full has the counts."""
    error: type[ShmBridgeError] = NotAdmitted
    culprit = f"the consumer (pid {control.hub_pid}) has no room"
    hint = "the learner's steps make room: wait longer, or raise Consumer(max_off_policy_steps=)"
    if not is_locked(control.mapping.fd, LockByte.HUB):
        error, culprit, hint = NoConsumer, "no consumer is alive", "start the learner"
    elif control.paused:
        culprit, hint = f"paused by the consumer (pid {control.hub_pid})", "resume the bridge"
    elif isinstance(answer, Full):
        culprit += (
            f": {answer.running} groups are being generated and {answer.committed} wait or are trained "
        )
        culprit += f"with, of {answer.limit}"
    numbers = {"producer": producer_id, "tickets": tickets, "timeout_s": timeout_s}
    return obstacle(error, "no ticket", culprit=culprit, hint=hint, **numbers)


def ahead(producer_id: str, bridge: str, stamped: int, published: int) -> str:
    """Returns the warning, logged once, about groups stamped with an unpublished version."""
    newest = f"{published} is the newest published" if published >= 0 else "none is published"
    return (
        f"{producer_id} puts groups of policy version {stamped}, and {newest} on bridge {bridge!r}: they "
        "count as new, however old they get -> policy_version= is the one when generation began"
    )


def check_agrees_with_bridge(columns: Columns, control: header.Control, bridge: str) -> None:
    """Raises SchemaMismatch if the consumer or another producer has a column of another type."""
    columns.check_agrees(Columns.decode(control.columns), "in this producer", "in the consumer")
    for name in lane_names(bridge):
        if (info := lane_header(name)) is not None:
            try:
                peer = Columns.decode(info["columns"])
            except SchemaMismatch:  # a lane this build cannot read: the consumer refuses it
                continue
            columns.check_agrees(peer, "in this producer", f"in producer {info['producer_id']}")


def lane_counters(lane: Mapping) -> dict[str, float]:
    """Returns the lane's counters, some of them per reason. Never blocks; any thread."""
    words = header.lane_counters(lane)
    return {
        "records_total": words["tail"],
        "bytes_total": words["bytes"],
        "tokens_total": words["tokens"],
        "wait_s": words["wait_ns"] / 1e9,
        "late_wakes_total": words["late_wakes"],
        "logprobs_unrecorded_total": words["logprobs_unrecorded"],
        "waiting": words["tail"] - words["head"],
        **labelled("dropped_total", Drop, words["dropped"]),
        **labelled("episodes_lost_total", Lost, words["episodes_lost"]),
    }


def create_lane(
    bridge: str,
    lane_bytes: int,
    columns: Columns,
    given_id: str,
    env_name: str,
    origin: tuple[bytes, bytes, int] | None = None,
) -> tuple[str, Mapping, str]:
    """Returns a new lane's segment, its name and mapping, and the producer id that its records carry.

    `origin`: LaneOrigin.words() of a lane that a relay writes. Blocks to reserve memory. A text that
    cannot be encoded leaves no lane behind.
    """
    given, env = given_id.encode()[:63], env_name.encode()[:127]
    slots = sizing.slots_of(lane_bytes)
    *_, size = header.lane_geometry(lane_bytes, slots)
    name, lane = new_lane_segment(bridge, size)
    producer_id = f"{given.decode(errors='ignore')}-{name.rpartition('.')[2]}"
    header.format_lane(
        lane,
        lane_bytes,
        slots,
        columns.encode(),
        len(columns),
        os.getpid(),
        pid_namespace(),
        producer_id.encode(),
        env,
        *(origin or ()),
    )
    return name, lane, producer_id


class OwnNames:
    """The names of one producer's lane and control segment. Any thread."""

    def __init__(
        self,
        producer_id: str,
        bridge: str,
        control: header.Control,
        lane_name: str,
        lane: Mapping,
        writer: LaneWriter,
    ) -> None:
        self._producer_id, self._lane_name, self._lane, self._writer = producer_id, lane_name, lane, writer
        self._control, self._control_name = control, control_name(bridge)

    @property
    def removed(self) -> bool:
        """Whether either was removed. Two stat calls."""
        both = ((self._lane.fd, self._lane_name), (self._control.mapping.fd, self._control_name))
        return not all(still_named(*each) for each in both)

    def check(self) -> None:
        """Raises LaneRemoved if either was removed; checks at most every LOOK_S."""
        if self._writer.look_due:
            if self.removed:
                raise self._is_removed(self._unreachable())
            self._writer.looked(LOOK_S)

    def check_reachable(self) -> None:
        """Raises LaneRemoved if the lane holds records that no consumer reads or can find."""
        if lost := self._unreachable():
            raise self._is_removed(lost)

    def log_unreachable(self) -> None:
        """Logs the number of such records, if any."""
        if lost := self._unreachable():
            log.error("%s", self._is_removed(lost))

    def _is_removed(self, records: int) -> ShmBridgeError:
        names = {"producer": self._producer_id, "lane": self._lane_name}
        return obstacle(LaneRemoved, "removed", records=records, **names)

    def _unreachable(self) -> int:
        if still_named(self._lane.fd, self._lane_name) or is_locked(self._lane.fd, LockByte.READER):
            return 0
        return self._writer.outstanding


class Slot(Claim):
    """`slot[column]` is a writable flat view in the lane until the `with` block ends; then `sequence` is set.

    An exception in the block aborts the claim; leaving the block a second time does nothing. For the
    producer's thread. Do not write to an array after the block: its memory is the consumer's then.
    """

    def __init__(self, writer: LaneWriter, plan: Plan, publish: Callable[["Slot"], None]) -> None:
        self.plan, self._publish = plan, publish
        self._columns = {column.name: column for column in plan.columns}
        self._unused = dict.fromkeys(column.name for column in plan.columns if column.count)

    @property
    def sequence(self) -> int | None:
        """Sequence of the committed record; None before."""
        return self.plan.sequence

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Returns the column's values: those of every row, one after another.

        NoColumn (a KeyError) for a column that was not claimed, ClaimOpen after the block.
        """
        if not self.is_open:
            raise obstacle(ClaimOpen, "claim over")
        if name not in self._columns:
            raise self._not_claimed(name)
        view = self.plan.view(self.memory(), self._columns[name])
        self._unused.pop(name, None)
        return view

    def __setitem__(self, name: str, values: object) -> None:
        """Refuses `slot[column] = values`: the memory is written in place."""
        if name not in self._columns:
            raise self._not_claimed(name)
        raise BadArgument(
            f"slot[{name!r}] = ... would replace the view, and write nothing", hint=f"slot[{name!r}][:] = ..."
        )

    def _not_claimed(self, name: object) -> NoColumn:
        claimed = ", ".join(map(repr, self._columns))
        hint = did_you_mean(name, self._columns) or f"add it to lengths= of claim: {{{name!r}: ...}}"
        return NoColumn(f"column {shown(name)} was not claimed; the claim has {claimed}", hint=hint)

    @property
    def unused(self) -> str | None:
        """A column with values that the block never asked for; None if there is none."""
        return next(iter(self._unused), None)

    def publish_whole(self) -> None:
        """Checks and publishes the values the block wrote; for `__exit__`."""
        self._publish(self)

    def __repr__(self) -> str:
        state = (
            "open" if self.is_open else "over" if self.sequence is None else f"committed as {self.sequence}"
        )
        return f"<Slot of {self.plan.rows} rows, {self.plan.tokens} tokens: {state}>"
