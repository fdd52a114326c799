"""What a lane's own words say of its releases: as the hub counted them, and as the slots show them.

Looks from outside.

Knows lanes; knows nothing of processes or logs. `lose_two` is the error that the check must find.
"""

import time

import numpy as np

from shmbridge._ext import header
from shmbridge.segments import inventory, segment

_PATIENCE_S = 3.0
_TICK_S = 0.01
_HEAD = 0x300 // 8  # head, the discards by reason, quarantined, released_total


def unaccounted(bridge: str, patience_s: float = _PATIENCE_S) -> dict[str, int]:
    """By lane, releases that the slots show and nobody has counted, once they are the same in no look.

    A release under way, or one that a killed hub had not counted, makes a lane differ until it is over or the
    next hub has come. Whoever looks in between sees the difference larger and never smaller, so one look
    without a difference shows that there is none.
    """
    left: dict[str, int | None] = dict.fromkeys(segment.lane_names(bridge), 0)
    until_s = time.monotonic() + patience_s
    while left:
        fates = {name: inventory.lane_info(name) for name in left}
        left = {
            name: fate.unaccounted
            for name, fate in fates.items()
            if fate is not None and fate.unaccounted != 0
        }
        if time.monotonic() >= until_s:
            break
        time.sleep(_TICK_S if left else 0)
    return {name: count for name, count in left.items() if count is not None}  # None: it was too busy to tell


def lose_two(bridge: str) -> bool:
    """Makes one lane look as if two records had been released without a count, one more than a kill explains.

    Whether it does.
    """
    for name in segment.lane_names(bridge):
        lane = segment.open_mapping(name)
        if lane is None or (counters := header.lane_counters(lane))["released"] < 2:
            continue
        words = np.frombuffer(memoryview(lane), "<u8")
        words[_HEAD + len(counters["discarded"]) + 2] -= 2
        counted, shown = header.releases(lane)
        if shown is not None and shown - counted >= 2:  # else the hub has just written its count over it
            return True
    return False
