"""Copies of the records of a bridge, for programs that watch it: `tail`, the live view, a recorder.

An observer attaches read-only, takes nothing away and holds nothing back. So it may be too late: a record
that was released before its copy was whole is counted in `missed`, never half shown. A lane that was removed
before it could be opened is counted in `missed_lanes`; how many records it had nobody can tell.
"""

import time
from typing import Self

from shmbridge._ext import header
from shmbridge._ext.lane import LaneObserver
from shmbridge.config import check_bridge_name, deadline_of
from shmbridge.errors import ShmBridgeError
from shmbridge.record import Lane, Record
from shmbridge.schema import Columns
from shmbridge.segments import lane_names, open_mapping
from shmbridge.watch.arrivals import Arrivals

_LOOK_FOR_LANES_S = 0.1
_SHORTEST_S, _LONGEST_S = 0.001, 0.02


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

        Looks every 20 ms: nobody has to wake an observer.
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
            said = None if mapping is None else header.read_lane(mapping)
            if mapping is None or said is None:
                return
            if said["layout_version"] != header.layout_version:
                self.unreadable[name] = (
                    f"layout version {said['layout_version']}, this build has {header.layout_version}"
                )
                return
            lane = LaneObserver(mapping, None)
            Lane.of(said, Columns.decode(said["columns"]), name).describe_to(lane, said["columns"])
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
        self.environments.add(said["env_name"])
