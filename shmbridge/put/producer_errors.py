"""The errors of a producer that cannot put: the process in the way, numbers, and what to do."""

from shmbridge._ext import header
from shmbridge._ext import lane as lane_writer
from shmbridge.config import format_size
from shmbridge.control.messages import Full
from shmbridge.errors import (
    BridgeDraining,
    ClaimOpen,
    Closed,
    InvalidRecord,
    LaneFull,
    LaneQuarantined,
    LaneRemoved,
    NoConsumer,
    NotAdmitted,
)
from shmbridge.segments import locks
from shmbridge.segments.locks import LockByte
from shmbridge.shown import counted


def lane_full(
    producer_id: str,
    control: header.Control,
    writer: lane_writer.LaneWriter,
    wanted_bytes: int,
    waited_s: float,
) -> LaneFull:
    """No room came in time."""
    if not locks.is_locked(control.mapping.fd, LockByte.HUB):
        culprit, hint = "no consumer is alive: waiting for the next one", "start the learner"
    elif control.paused:
        culprit, hint = f"paused by the consumer (pid {control.hub_pid})", "resume the bridge"
    else:
        records = counted(writer.outstanding, "record")
        culprit = f"consumer pid {control.hub_pid} is alive and has not released {records}"
        hint = "the learner is slow or holds leases: raise lane_bytes, or lower what it holds"
        if dropped := writer.leases_dropped:
            culprit += f", {dropped} of them dropped without release"
            hint = (
                "the consumer's log says which call handed them out: release() each record there, or call "
                "take_back_dropped()"
            )
    return LaneFull(
        f"lane of {producer_id} has no room for {format_size(wanted_bytes)} after {waited_s:.1f} s "
        f"({format_size(writer.free_bytes)} of {format_size(writer.data_bytes)} free, "
        f"{writer.slot_count - writer.outstanding} of {writer.slot_count} slots); {culprit}",
        hint=hint,
    )


def quarantined(producer_id: str, hub_pid: int) -> LaneQuarantined:
    """The hub has quarantined the lane and reads it no more."""
    return LaneQuarantined(
        f"the consumer (pid {hub_pid}) has quarantined the lane of {producer_id}: its words cannot be true",
        hint="something overwrote shared memory: see the consumer's log, then open a new producer",
    )


def lane_removed(producer_id: str, lane_name: str, records: int) -> LaneRemoved:
    """The lane was removed by force; no consumer can reach `records` of its records."""
    left = f"; {counted(records, 'record')} in it can be reached by no consumer" if records else ""
    return LaneRemoved(
        f"lane {lane_name} of {producer_id}, or its bridge's control segment, was removed from "
        f"/dev/shm{left}",
        hint="close it and open a new producer; if the user's last logout did it, set RemoveIPC=no in "
        "/etc/systemd/logind.conf",
    )


def ahead(producer_id: str, bridge: str, stamped: int, published: int) -> str:
    """Returns the warning, logged once, about groups stamped with an unpublished version."""
    newest = f"{published} is the newest published" if published >= 0 else "none is published"
    return (
        f"{producer_id} puts groups of policy version {stamped}, and {newest} on bridge {bridge!r}: they "
        "count as new, however old they get -> policy_version= is the version when generation began, as "
        "producer.policy_version says it"
    )


def closed(producer_id: str) -> Closed:
    """The producer has left the bridge."""
    return Closed(f"producer {producer_id} is closed", hint="open a new one: Producer(bridge)")


def forked(producer_id: str) -> Closed:
    """This is a child of fork."""
    return Closed(
        f"producer {producer_id} belongs to the process before fork", hint="open a new one in this process"
    )


def closed_while_waiting(producer_id: str) -> Closed:
    """close() found no room for a group that put_async had accepted."""
    return Closed(
        f"producer {producer_id} was closed while this group waited for room: it is counted in dropped_total"
    )


def not_drained(producer_id: str, records: int, timeout_s: float | None) -> LaneFull:
    """close(drain=True) waited for releases that did not come."""
    return LaneFull(
        f"{counted(records, 'record')} of {producer_id} {'was' if records == 1 else 'were'} not released "
        f"within {timeout_s} s",
        hint="close(drain=False) leaves them for the next consumer",
    )


def claim_open(producer_id: str) -> ClaimOpen:
    """The producer has an open claim, and one at a time is allowed."""
    return ClaimOpen(
        f"producer {producer_id} has an open claim", hint="put after the `with producer.claim(...)` block"
    )


def claim_over() -> ClaimOpen:
    """The claim was given back inside its block."""
    return ClaimOpen(
        "the claim is over: it was given back before its block ended", hint="write inside the `with` block"
    )


def unwritten(column: str) -> InvalidRecord:
    """A column was claimed, and the block never asked for it."""
    return InvalidRecord(
        f"column {column!r} was claimed and never written: its memory holds values of earlier records",
        hint=f"write slot[{column!r}][:] = ... in the block, or leave {column!r} out of lengths=",
        column=column,
    )


def no_origin(producer_id: str, sequence: int) -> InvalidRecord:
    """Returns the error of a relayed record in a lane of this node's own."""
    return InvalidRecord(
        f"record {sequence} of another node, and the lane of {producer_id} has no origin",
        hint="open the producer with origin=",
    )


def draining(bridge: str) -> BridgeDraining:
    """The bridge is drained: the run is over."""
    return BridgeDraining(
        f"the consumer of bridge {bridge!r} is draining it", hint="the run is over: close the producer"
    )


def not_admitted(
    producer_id: str, control: header.Control, answer: object, tickets: int, timeout_s: float | None
) -> NotAdmitted | NoConsumer:
    """No ticket came in time; `answer`, if it is messages.Full, holds the counts."""
    waited = f"{producer_id} was given no ticket within {timeout_s} s and holds {tickets}"
    if not locks.is_locked(control.mapping.fd, LockByte.HUB):
        return NoConsumer(f"{waited}; no consumer is alive", hint="start the learner")
    if control.paused:
        return NotAdmitted(
            f"{waited}; paused by the consumer (pid {control.hub_pid})", hint="resume the bridge"
        )
    under_way = ""
    if isinstance(answer, Full):
        under_way = (
            f": {answer.running} groups are being generated and {answer.committed} wait or are trained "
            f"with, of {answer.limit}"
        )
    return NotAdmitted(
        f"{waited}; the consumer (pid {control.hub_pid}) has no room{under_way}",
        hint="the learner's steps make room: wait longer, or raise Consumer(max_off_policy_steps=)",
    )


def other_clock(producer_id: str, hub_pid: int, ahead_s: float) -> NotAdmitted:
    """The consumer's promises expire before they are asked for: the two read different clocks."""
    return NotAdmitted(
        f"{producer_id} reads a clock that is {ahead_s:.0f} s ahead of its consumer's (pid {hub_pid}): "
        "another time namespace",
        hint="run both in one time namespace: no ticket granted there can be believed here",
    )


def too_many_tickets(producer_id: str, most: int) -> NotAdmitted:
    """The producer holds the most tickets that a lane can show."""
    return NotAdmitted(
        f"{producer_id} holds {most} tickets, the most that a lane shows",
        hint="end those of groups that were put",
    )


def removed(producer_id: str) -> NoConsumer:
    """The lane or the control segment was removed by force: a later consumer has other segments."""
    return NoConsumer(
        f"no consumer will answer {producer_id}: its lane or the control segment was removed",
        hint="close it and open a new producer",
    )
