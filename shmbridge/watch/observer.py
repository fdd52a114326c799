"""Copies of the records of a bridge, for programs that watch it: `tail`, the live view, a recorder.

An observer attaches read-only, takes nothing away and holds nothing back. So it may be too late: a record
that was released before its copy was whole is counted in `missed`, never half shown. A lane that was removed
before it could be opened is counted in `missed_lanes`; the count of its records is unknown.
"""

import contextlib
import ctypes
import errno
import os
import struct
import threading
import time
from typing import Self

from shmbridge._ext import header
from shmbridge._ext.lane import LaneObserver
from shmbridge.config import check_bridge_name, deadline_of
from shmbridge.errors import ShmBridgeError
from shmbridge.record import Lane, Record
from shmbridge.schema import Columns
from shmbridge.segments import MOUNT, control_name, lane_names, open_mapping

_CREATED, _TOO_MANY = 0x100, 0x4000  # IN_CREATE, IN_Q_OVERFLOW
_HEAD = struct.Struct("iIII")  # struct inotify_event without its name
_READ_BYTES = 1 << 16
_NICEST = 19
_LOOK_FOR_LANES_S = 0.1
_SHORTEST_S, _LONGEST_S = 0.001, 0.02


class Arrivals:
    """Notes each lane of a bridge from now on; costs its producers nothing but a note at their start.

    Where the kernel has no inotify, or no more of it for this user, it notes nothing: see `is_complete`.
    """

    def __init__(self, bridge: str) -> None:
        self._prefix = control_name(check_bridge_name(bridge))[1:].removesuffix("c") + "l."
        self.is_complete = False  # whether every lane since the beginning was noted
        self._fd = -1
        libc = ctypes.CDLL(None, use_errno=True)
        with contextlib.suppress(AttributeError):
            self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            watch = libc.inotify_add_watch(self._fd, os.fsencode(MOUNT), _CREATED)
            self.is_complete = self._fd >= 0 and watch >= 0

    def take(self) -> set[str]:
        """Returns the names of lanes that were created since the last call. Never blocks."""
        found: set[str] = set()
        while self._fd >= 0:
            try:
                events = os.read(self._fd, _READ_BYTES)
            except OSError as wrong:
                if wrong.errno not in (errno.EAGAIN, errno.EINTR):
                    self.is_complete = False
                break
            found |= self._lanes(events)
        return found

    def close(self) -> None:
        """Ends the notes. Never blocks."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _lanes(self, events: bytes) -> set[str]:
        found, at = set(), 0
        while at < len(events):
            _, mask, _, length = _HEAD.unpack_from(events, at)
            name = events[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
            at += _HEAD.size + length
            if mask & _TOO_MANY:
                self.is_complete = False
            elif (text := os.fsdecode(name)).startswith(self._prefix):
                found.add(f"/{text}")
        return found


def give_way() -> None:
    """Makes this thread, and those that it starts, as nice as the kernel allows. Never blocks.

    Beside one thread that is always busy it gets 1.5 % of a core; unlike an idle thread it always gets that.
    For good: an ordinary user may not take it back. Between sessions (autogroups), and between containers
    with CPU shares of their own, the kernel shares cores as before.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)


class Observer:
    """Reads every lane of a bridge beside its consumer, or without one; a context manager.

    Waits for a bridge that does not exist yet. One thread at a time. Records are copies: their memory is
    the caller's, and release() ends the copy alone.

    Args:
        bridge: name of the bridge.
        backlog: whether to begin with the records that are un-released now; else with the next ones.
        follow: whether to go on with records that come; else it ends with those that are there now.

    Raises BadBridgeName.
    """

    def __init__(self, bridge: str, *, backlog: bool = True, follow: bool = True) -> None:
        self.bridge = check_bridge_name(bridge)
        self.unreadable: dict[str, str] = {}  # lanes of another layout or with garbage, and why
        self.environments: set[str] = set()  # of all lanes that were opened
        self.missed_lanes = 0  # that were removed before they could be opened, as far as the kernel tells
        self._has_begun = self._has_ended = False
        self._lanes: dict[str, LaneObserver] = {}
        self._again: set[str] = set()  # lanes that a limit of this process kept from being opened
        self._expected: set[str] = set()  # lanes that exist, or existed, and were not opened yet
        self._arrivals = Arrivals(bridge)
        self._gone_missed = 0
        self._looked_s = float("-inf")
        self._look_for_lanes()
        self._has_begun, self._has_ended = True, not follow
        for lane in self._lanes.values():
            if not backlog:
                lane.skip_backlog()
            if not follow:
                lane.end_with_backlog()

    @property
    def missed(self) -> int:
        """Records that were committed while this observer looked, and that it could not copy in time."""
        return self._gone_missed + sum(lane.missed for lane in self._lanes.values())

    def poll(self, max_records: int = 256) -> list[Record]:
        """Returns copies of up to `max_records` records that came since, in order per lane; never blocks.

        Lanes take turns, so that a quick one hides no other.
        """
        self._look_for_lanes(at_most_every_s=_LOOK_FOR_LANES_S)
        found = self._copies(max_records)
        if not found:
            self._look_for_lanes()
            found = self._copies(max_records)
        return found

    def newest(self, lane_name: str) -> Record | None:
        """Returns a copy of the newest un-released record of a lane, also one that poll returned; or None.

        Never blocks.
        """
        self._look_for_lanes()
        lane = self._lanes.get(lane_name)
        return None if lane is None else lane.newest(Record)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until a record comes, at most `timeout_s` seconds (None: for ever); returns whether one did.

        Looks every 20 ms: other processes need not wake an observer.
        """
        deadline, pause_s = deadline_of(timeout_s), _SHORTEST_S
        while True:
            self._look_for_lanes(at_most_every_s=_LOOK_FOR_LANES_S)
            if any(lane.waiting for lane in self._lanes.values()):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_S)

    def close(self) -> None:
        """Ends the observation; gives the lanes' memory back, once no copy refers to them. Never blocks."""
        self._gone_missed, self._has_ended = self.missed, True
        self._lanes.clear()
        self._arrivals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copies(self, most: int) -> list[Record]:
        found: list[Record] = []
        lanes = list(self._lanes.values())
        while lanes and len(found) < most:
            for lane in list(lanes):
                record = lane.copy(Record) if len(found) < most else None
                if record is None:
                    lanes.remove(lane)
                else:
                    found.append(record)
        return found

    def _look_for_lanes(self, *, at_most_every_s: float = 0.0) -> None:
        """Opens lanes that came, and drops those whose names are gone and that were read to the end."""
        now_s = time.monotonic()
        came = self._arrivals.take()
        if self._has_ended or (not came and now_s - self._looked_s < at_most_every_s):
            return
        self._looked_s = now_s
        names = set(lane_names(self.bridge))
        for name in self._lanes.keys() - names:
            if not self._lanes[name].waiting:
                self._gone_missed += self._lanes.pop(name).missed
        known = self._lanes.keys() | self.unreadable.keys()
        for name in sorted(names - known | self._again & names):
            self._open(name)
        self._expected = (self._expected | came | names) - known - self._lanes.keys() - self.unreadable.keys()
        self.missed_lanes += len(self._expected - names)
        self._expected &= names

    def _open(self, name: str) -> None:
        """Opens a lane; one that is not ready yet is looked at again, one that cannot be read is noted."""
        try:
            mapping = open_mapping(name, readonly=True, minimum=header.control_bytes)
            about = None if mapping is None else header.read_lane(mapping)
            if mapping is None or about is None:
                return
            if about["layout_version"] != header.layout_version:
                self.unreadable[name] = (
                    f"layout version {about['layout_version']}, this build has {header.layout_version}"
                )
                return
            lane = LaneObserver(mapping, None)
            Lane.of(about, Columns.decode(about["columns"]), name).describe_to(lane, about["columns"])
        except (OSError, ShmBridgeError, header.LaneCorrupt) as wrong:
            self.unreadable[name] = str(wrong)
            if isinstance(wrong, OSError):  # no descriptor or no memory left: it may pass
                self._again.add(name)
            return
        if self._has_begun:  # the lane began since
            lane.miss_earlier()
        self._lanes[name] = lane
        self._again.discard(name)
        self.unreadable.pop(name, None)
        self.environments.add(about["env_name"])
