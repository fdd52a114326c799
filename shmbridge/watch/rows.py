"""The rows of a table of lanes, grouped by environment and summed: for `inspect` and the live view."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from shmbridge.watch.diagnosis import rate, wait_share
from shmbridge.watch.processes import State
from shmbridge.watch.snapshot import BridgeLook, LaneLook

FEW = 12  # lanes of a bridge that are all shown


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a lane, or the sum over the lanes of an environment."""

    label: str  # a producer's id, or an environment's name
    env_name: str
    lane: str | None  # the segment; None for a sum
    lanes: int  # that it sums up; 1 for a lane
    pid: int | None  # None for a sum
    state: str
    rate: float | None  # records per second; None: unknown
    held: int
    fill_bytes: float  # 0 to 1, of the fullest lane
    fill_slots: float  # likewise
    newest_age_s: float | None  # of the newest put of all
    wait: float | None  # 0 to 1, share of the time between two looks spent waiting for room; None: unknown
    lag: int | None  # versions behind the newest policy; None: unknown
    dropped: int
    is_trouble: bool
    origin_node: str = ""  # from which a relay brings its records; "": from none

    @property
    def title(self) -> str:
        """What it stands for, and where its records come from."""
        return f"{self.label} from {self.origin_node}" if self.origin_node else self.label

    @property
    def fill(self) -> float:
        """The fuller of bytes and slots, 0 to 1."""
        return max(self.fill_bytes, self.fill_slots)


def rows(now: BridgeLook, before: BridgeLook | None = None, *, every_lane: bool = False) -> list[Row]:
    """Returns the rows of a bridge: a sum per environment, and under it its lanes. Never blocks.

    Of a bridge with more than a few lanes, only those in trouble are shown by themselves, as long as these
    are few.

    Args:
        now, before: two looks; without an earlier one, rates and waits are unknown.
        every_lane: show every lane.
    """
    found: list[Row] = []
    lanes = lane_rows(now, before)
    shows_all, shows_troubles = every_lane or len(lanes) <= FEW, has_few_troubles(lanes)
    for env_name, of_it in groupby(lanes, key=lambda row: row.env_name):
        each = list(of_it)
        shown = [row for row in each if shows_all or (shows_troubles and row.is_trouble)]
        if len(each) > 1:
            found.append(summed(env_name, each))
        elif not shown:
            shown = each
        found += shown
    return found


def has_few_troubles(lanes: list[Row]) -> bool:
    """Returns whether the lanes in trouble can be shown by themselves. Never blocks."""
    return sum(row.is_trouble for row in lanes) <= FEW


def lane_rows(now: BridgeLook, before: BridgeLook | None = None) -> list[Row]:
    """Returns a row per lane, in the order of the look. Never blocks."""
    waiting = {lane.name for lane in now.waiting}
    return [_row(now, before, lane, lane.name in waiting) for lane in now.lanes]


def summed(env_name: str, each: list[Row]) -> Row:
    """Returns the sum over the lanes of an environment: of fill, waits and lag the highest of one lane."""
    return Row(
        env_name or "(no name)",
        env_name,
        None,
        len(each),
        None,
        _states(each),
        _total(row.rate for row in each),
        sum(row.held for row in each),
        max(row.fill_bytes for row in each),
        max(row.fill_slots for row in each),
        min((row.newest_age_s for row in each if row.newest_age_s is not None), default=None),
        max((row.wait for row in each if row.wait is not None), default=None),
        max((row.lag for row in each if row.lag is not None), default=None),
        sum(row.dropped for row in each),
        any(row.is_trouble for row in each),
    )


def losses(now: BridgeLook) -> dict[str, dict[str, int]]:
    """Returns records dropped (never committed) and discarded (released unread), and episodes lost (in no
    record), by reason, over all lanes.

    Reasons that never happened are left out. Never blocks.
    """
    found: dict[str, dict[str, int]] = {"dropped": {}, "discarded": {}, "episodes_lost": {}}
    for counter, total in found.items():
        for lane in now.lanes:
            for reason, count in getattr(lane, counter).items():
                if count:
                    total[reason] = total.get(reason, 0) + count
    return found


def _row(now: BridgeLook, before: BridgeLook | None, lane: LaneLook, waits_for_lane: bool) -> Row:
    state = "waits for a lane" if waits_for_lane else "quarantined" if lane.quarantined else str(lane.state)
    return Row(
        lane.producer_id,
        lane.env_name,
        lane.name,
        1,
        lane.pid,
        state,
        rate(now, before, lane),
        lane.held,
        lane.fill_bytes,
        lane.fill_slots,
        lane.newest_age_s,
        wait_share(now, before, lane),
        now.lag(lane),
        sum(lane.dropped.values()) + sum(lane.discarded.values()),
        waits_for_lane or lane.quarantined or lane.state is State.STOPPED,
        lane.origin_node,
    )


def _states(each: list[Row]) -> str:
    """Their common state; of different ones, how many are in trouble, else how many are not running."""
    counts = Counter(row.state for row in each)
    if len(counts) == 1:
        return each[0].state
    if troubles := sum(row.is_trouble for row in each):
        return f"{troubles} in trouble"
    return next(f"{count} {state}" for state, count in counts.items() if state != State.RUNNING)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
