"""What every trainer needs between a bridge and its steps: `Feed`, and what its adapters share.

Knows no trainer, and needs numpy only.
"""

from shmbridge.consumers.feed.earlier_run import (
    BridgeAhead,
    HeldRecords,
    Start,
    bridge_info,
    load_published,
    require_start,
    save_published,
    trained_as,
)
from shmbridge.consumers.feed.feed import STATE, Drained, Feed, Step, blames_groups, lacks_memory, lost_peer
from shmbridge.consumers.feed.settings import (
    Refused,
    ReleaseAt,
    Unfit,
    check_words,
    refuse,
    setting,
    warn_if_untested,
    warn_of_stale_rows,
)

__all__ = [
    "STATE",
    "BridgeAhead",
    "Drained",
    "Feed",
    "HeldRecords",
    "Refused",
    "ReleaseAt",
    "Start",
    "Step",
    "Unfit",
    "blames_groups",
    "bridge_info",
    "check_words",
    "lacks_memory",
    "load_published",
    "lost_peer",
    "refuse",
    "require_start",
    "save_published",
    "setting",
    "trained_as",
    "warn_if_untested",
    "warn_of_stale_rows",
]
