"""Groups returned to a closed consumer: the next consumer gets them, and the last return frees the bridge."""

import weakref
from collections.abc import Iterable

from shmbridge._ext.header import Mapping
from shmbridge._ext.lane import LaneReader
from shmbridge.record.groups import Group
from shmbridge.segments import locks, membership
from shmbridge.segments.locks import LockByte


def abandon(groups: Iterable[Group]) -> None:
    """Ends the groups' leases without release."""
    for group in groups:
        group.abandon()


class LateReturns:
    """Made when the consumer closes; does not keep a lane or the control segment mapped.

    For one thread at a time.
    """

    def __init__(self, readers: Iterable[LaneReader], control: Mapping, bridge: str) -> None:
        self._held_in = weakref.WeakSet([reader.lane for reader in readers if reader.held])
        self._control, self._bridge = weakref.ref(control), bridge

    def take(self, groups: list[Group], *, closed: bool) -> None:
        """Ends the groups' leases without release.

        `closed`: close() is over, so the end of the last lease gives the bridge up.

        An interrupted call may be repeated: the groups keep their records until the rest is done.
        """
        readers = {record._lane_reader for group in groups for record in group.records}
        abandon(groups)
        for reader in readers:
            if not reader.held:
                self._held_in.discard(reader.lane)
                if closed:
                    locks.unlock(reader.lane.fd, LockByte.READER)
        if closed and not self._held_in and (control := self._control()) is not None:
            membership.leave(control.fd, self._bridge)
        for group in groups:
            group.records = []  # a record keeps its lane mapped
