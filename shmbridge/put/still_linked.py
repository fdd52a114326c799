"""Checks whether a producer's lane and its control segment were removed by force."""

import logging

from shmbridge._ext import header
from shmbridge._ext import lane as lane_writer
from shmbridge._ext.header import Mapping
from shmbridge.put import producer_errors
from shmbridge.segments import locks, segment
from shmbridge.segments.locks import LockByte

log = logging.getLogger(__name__)

LOOK_S = 0.4  # seconds between two checks while putting or waiting


class OwnNames:
    """The names of one producer's lane and control segment. Any thread."""

    def __init__(
        self,
        producer_id: str,
        bridge: str,
        control: header.Control,
        lane_name: str,
        lane: Mapping,
        writer: lane_writer.LaneWriter,
    ) -> None:
        self._producer_id, self._lane_name, self._lane, self._writer = producer_id, lane_name, lane, writer
        self._control, self._control_name = control, segment.control_name(bridge)

    @property
    def removed(self) -> bool:
        """Whether either was removed. Two stat calls."""
        both = ((self._lane.fd, self._lane_name), (self._control.mapping.fd, self._control_name))
        return not all(segment.still_named(*each) for each in both)

    def check(self) -> None:
        """Raises LaneRemoved if either was removed; checks at most every LOOK_S."""
        if self._writer.look_due:
            if self.removed:
                raise producer_errors.lane_removed(self._producer_id, self._lane_name, self._unreachable())
            self._writer.looked(LOOK_S)

    def check_reachable(self) -> None:
        """Raises LaneRemoved if the lane holds records that no consumer reads or can find."""
        if lost := self._unreachable():
            raise producer_errors.lane_removed(self._producer_id, self._lane_name, lost)

    def say_what_is_left(self) -> None:
        """Logs the number of such records, if any."""
        if lost := self._unreachable():
            log.error("%s", producer_errors.lane_removed(self._producer_id, self._lane_name, lost))

    def _unreachable(self) -> int:
        if segment.still_named(self._lane.fd, self._lane_name) or locks.is_locked(
            self._lane.fd, LockByte.READER
        ):
            return 0
        return self._writer.outstanding
