"""The releases of a lane by its own words: as the hub counted them, and as the slots show them.

Looks from outside.

Knows lanes; knows nothing of processes or logs. `PlantedLoss` is the error that the check must find.
"""

import math
import time

import numpy as np

from shmbridge._ext import header
from shmbridge.segments import lane_info, lane_names, open_mapping

_PATIENCE_S = 3.0
_TICK_S = 0.01
_STORE_S = 0.3  # a process that is ready to run does so within this
_HEAD = 0x300 // 8  # head, the discards by reason, quarantined, released_total


def differing(bridge: str) -> dict[str, int | None]:
    """Returns, by lane, releases that the slots show and no hub has counted; None: the lane was too busy to
    tell.

    A release under way, or one that a killed hub had not counted, makes a lane differ until it is over or the
    next hub has come. A look in between shows the difference larger, never smaller, so one look without a
    difference shows that there is none.
    """
    fates = {name: lane_info(name) for name in lane_names(bridge)}
    return {
        name: fate.unaccounted for name, fate in fates.items() if fate is not None and fate.unaccounted != 0
    }


class Differences:
    """Lanes whose releases and count have differed in each look so far; call `look` again and again."""

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge
        self._left: dict[str, int | None] | None = None

    def look(self) -> bool:
        """Whether no lane differs any more."""
        now = differing(self._bridge)
        before = dict.fromkeys(now) if self._left is None else self._left
        # a busy lane keeps what was last seen of it
        self._left = {
            name: before[name] if apart is None else apart for name, apart in now.items() if name in before
        }
        return not self._left

    @property
    def known(self) -> dict[str, int]:
        """The differences by lane, without lanes that were always too busy to tell."""
        return {name: apart for name, apart in (self._left or {}).items() if apart is not None}


def unaccounted(bridge: str, patience_s: float = _PATIENCE_S) -> dict[str, int]:
    """Returns, by lane, releases that are not counted within that time."""
    found, until_s = Differences(bridge), time.monotonic() + patience_s
    while not found.look() and time.monotonic() < until_s:
        time.sleep(_TICK_S)
    return found.known


class PlantedLoss:
    """The error that the check must find: two releases of a lane are not counted, and stay so."""

    def __init__(self, bridge: str) -> None:
        self._bridge, self._since_s = bridge, math.inf

    def stays(self) -> bool:
        """Plants the error unless it is there; returns whether it has been there long enough, since a hub
        that was about to store its count would have undone it.
        """
        apart = differing(self._bridge).values()
        if any(count is not None and count >= 2 for count in apart):
            return time.monotonic() - self._since_s > _STORE_S
        if None not in apart and lose_two(self._bridge):
            self._since_s = time.monotonic()
        return False


def lose_two(bridge: str) -> bool:
    """Makes one lane look as if two records had been released without a count, one more than a kill explains.

    Whether it does.
    """
    for name in lane_names(bridge):
        lane = open_mapping(name)
        if lane is None or (counters := header.lane_counters(lane))["released"] < 2:
            continue
        words = np.frombuffer(memoryview(lane), "<u8")
        words[_HEAD + len(counters["discarded"]) + 2] -= 2
        counted, shown = header.releases(lane)
        if shown is not None and shown - counted >= 2:  # else the hub has just written its count over it
            return True
    return False
