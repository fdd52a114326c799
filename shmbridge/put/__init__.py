"""From a group to a record in a lane: forms of columns, the plan, the lane, tickets, what is refused."""

from shmbridge.put.convert import as_invalid, groups_of, token_array
from shmbridge.put.lane import (
    LOOK_S,
    OwnNames,
    Slot,
    Ticket,
    Tickets,
    ahead,
    check_agrees_with_bridge,
    create_lane,
    lane_counters,
    lane_full,
    obstacle,
)
from shmbridge.put.planner import (
    LONGEST_NODE,
    FlatColumn,
    LaneOrigin,
    RecordedGroup,
    RecordPlanner,
    RelayedRecord,
    Version,
    checked_stamp,
)

__all__ = [
    "LONGEST_NODE",
    "LOOK_S",
    "FlatColumn",
    "LaneOrigin",
    "OwnNames",
    "RecordPlanner",
    "RecordedGroup",
    "RelayedRecord",
    "Slot",
    "Ticket",
    "Tickets",
    "Version",
    "ahead",
    "as_invalid",
    "check_agrees_with_bridge",
    "checked_stamp",
    "create_lane",
    "groups_of",
    "lane_counters",
    "lane_full",
    "obstacle",
    "token_array",
]
