"""What a consumer owns: lanes, the groups in them, batches, admission and state; and what a rank is."""

from shmbridge.hub.batches import Batches, Prefetcher, Steps
from shmbridge.hub.counts import GroupQueue, OutsideQueue, RecentLatency, check_outside, percentile_s
from shmbridge.hub.former import (
    LAGS,
    BatchFormer,
    BatchRequest,
    Held,
    Policy,
    Scheduling,
    Screen,
    Want,
    check_screen,
    is_stale,
    scheduler_of,
    staleness_of,
)
from shmbridge.hub.hub import Hub, become_hub, note_hub
from shmbridge.hub.lanes import HubLane, LaneSet, Tap, check_tap
from shmbridge.hub.rank import Rank, RankShare
from shmbridge.hub.ranks import DeadRank, Mode, RankServer, ShareBook, ShareDealer, share_out
from shmbridge.hub.state import PROMISE_NS, HubState, OffPolicyLimit, Promises, limit_of
from shmbridge.hub.waiting import LoopBell, Waiting

__all__ = [
    "LAGS",
    "PROMISE_NS",
    "BatchFormer",
    "BatchRequest",
    "Batches",
    "DeadRank",
    "GroupQueue",
    "Held",
    "Hub",
    "HubLane",
    "HubState",
    "LaneSet",
    "LoopBell",
    "Mode",
    "OffPolicyLimit",
    "OutsideQueue",
    "Policy",
    "Prefetcher",
    "Promises",
    "Rank",
    "RankServer",
    "RankShare",
    "RecentLatency",
    "Scheduling",
    "Screen",
    "ShareBook",
    "ShareDealer",
    "Steps",
    "Tap",
    "Waiting",
    "Want",
    "become_hub",
    "check_outside",
    "check_screen",
    "check_tap",
    "is_stale",
    "limit_of",
    "note_hub",
    "percentile_s",
    "scheduler_of",
    "share_out",
    "staleness_of",
]
