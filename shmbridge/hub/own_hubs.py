"""Becomes the hub of a bridge, and knows the hubs of this very process: one may be replaced, and what is left
of a closed one can be named.
"""

import gc
import os
from collections import Counter
from collections.abc import Iterator

from shmbridge._ext import header
from shmbridge._ext.lane import LaneReader
from shmbridge.errors import ConsumerTaken
from shmbridge.hub.ending import Ending
from shmbridge.record.leases import lane_name
from shmbridge.record.record import Record
from shmbridge.segments import locks, membership
from shmbridge.segments.locks import LockByte
from shmbridge.segments.segment import is_lane_of

# By bridge, until nothing refers to its memory; a hub that is here is collected all the same. A child of fork
# inherits its parent's, whose close() does nothing there.
_ours: dict[str, Ending] = {}


def note_hub(bridge: str, ending: Ending) -> None:
    """Notes the newest hub of this process on a bridge, and forgets those that are gone."""
    for name, ended in list(_ours.items()):
        if ended.is_gone:
            _ours.pop(name, None)
    _ours[bridge] = ending


def become_hub(bridge: str, *, replace: bool = False) -> header.Control:
    """Takes the hub lock and returns the control segment's words.

    Args:
        bridge: name of the bridge.
        replace: first close an earlier hub of this process, and end its leases that no view needs. Blocks
            until it is closed.

    Raises:
        ConsumerTaken: another process is the hub; or this one, or views of its records are left.
    """
    earlier = _ours.get(bridge) if replace else None
    if earlier is not None:
        earlier.closing.close()
    control = membership.open_control(bridge)

    def is_ours() -> bool:
        return locks.lock_after(
            lambda: control.hub_pid if locks.is_own_namespace(control.hub_pid_namespace) else 0,
            control.mapping.fd,
            LockByte.HUB,
        )

    if not (is_ours() or (earlier is not None and _give_back(earlier) and is_ours())):
        pid, same = control.hub_pid, locks.is_own_namespace(control.hub_pid_namespace)
        membership.leave(control.mapping.fd, bridge)
        raise _taken(bridge, pid, pid == os.getpid() and same)
    control.enter(
        os.getpid(), locks.pid_namespace()
    )  # so that a second consumer names the right pid in its error
    header.fault(b"hub.locked")
    return control


def _give_back(ended: Ending) -> bool:
    """Ends, without release, the leases of a closed hub that no view needs; frees the bridge if all are.

    Returns whether it is free. A loop variable or a cell's result may hold such records for ever.
    """
    views = False
    for record, viewed in _leased(ended.bridge):
        if viewed:
            views = True
        else:
            record._abandon()
    if not views:
        ended.free()
    return not views


def _taken(bridge: str, pid: int, own: bool) -> ConsumerTaken:
    earlier = _ours.get(bridge)
    if not own:
        return ConsumerTaken(
            f"bridge {bridge!r} has a living consumer: pid {pid}",
            hint=f"close it and drop its records first, or use another bridge; ps -p {pid}",
        )
    if earlier is not None and not earlier.closing.over:
        return ConsumerTaken(
            f"bridge {bridge!r} has a living consumer: pid {pid} (this very process)",
            hint="close it first; or, when a notebook's cell runs again, Consumer(..., replace=True)",
        )
    return ConsumerTaken(
        f"bridge {bridge!r} has a closed consumer in pid {pid} (this very process): {_still_held(bridge)}",
        hint="drop them: del, or copy what you keep. IPython keeps what cells showed: show three other "
        "results, then %reset -f out; after an error also sys.last_traceback = sys.last_value = None",
    )


def _still_held(bridge: str) -> str:
    """Returns the words for the records of closed hubs of this process that something still refers to."""
    leased = [viewed for _, viewed in _leased(bridge)]
    if not leased:
        return "something of it is still in use"
    columns = Counter(name for viewed in leased for name in viewed)
    views = ", ".join(f"{count} of {name}" for name, count in sorted(columns.items()))
    return f"{len(leased)} of its records are still referred to, with views: {views or 'none'}"


def _leased(bridge: str) -> Iterator[tuple[Record, list[str]]]:
    """Yields the records that keep a hub of that bridge here, each with the columns of its views."""
    for each in gc.get_objects():
        if issubclass(type(each), Record) and type(each._lane_reader) is LaneReader:
            viewed = each._viewed()
            if viewed is not None and is_lane_of(lane_name(each), bridge):
                yield each, viewed
