"""From a group to a record in a lane: forms of columns, the plan, the lane, tickets, what is refused."""

from shmbridge.put.convert import as_invalid as as_invalid
from shmbridge.put.convert import groups_of as groups_of
from shmbridge.put.convert import token_array as token_array
from shmbridge.put.lane import LOOK_S as LOOK_S
from shmbridge.put.lane import OwnNames as OwnNames
from shmbridge.put.lane import Slot as Slot
from shmbridge.put.lane import Ticket as Ticket
from shmbridge.put.lane import Tickets as Tickets
from shmbridge.put.lane import ahead as ahead
from shmbridge.put.lane import check_agrees_with_bridge as check_agrees_with_bridge
from shmbridge.put.lane import create_lane as create_lane
from shmbridge.put.lane import lane_counters as lane_counters
from shmbridge.put.lane import lane_full as lane_full
from shmbridge.put.lane import obstacle as obstacle
from shmbridge.put.planner import LONGEST_NODE as LONGEST_NODE
from shmbridge.put.planner import FlatColumn as FlatColumn
from shmbridge.put.planner import LaneOrigin as LaneOrigin
from shmbridge.put.planner import RecordedGroup as RecordedGroup
from shmbridge.put.planner import RecordPlanner as RecordPlanner
from shmbridge.put.planner import RelayedRecord as RelayedRecord
from shmbridge.put.planner import Version as Version
from shmbridge.put.planner import checked_stamp as checked_stamp
