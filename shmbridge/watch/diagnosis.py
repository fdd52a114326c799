"""What is wrong with a bridge, in sentences, worst first, each with one next action; the rows of its lanes.

`findings` returns all that is wrong; `headline` is the worst of it, or what a healthy bridge does.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

from shmbridge.config import format_size
from shmbridge.errors import counted
from shmbridge.metrics import waiting_shares
from shmbridge.watch.snapshot import BridgeLook, ConsumerLook, LaneLook, State

LONG_S = 5.0  # a shorter wait is normal
_LITTLE = 0.05  # of the mount
_SMALL = 64 << 20  # bytes: a lane's usual size
_NAMED = 3  # environments named in one sentence
_MOST_LAG = 8  # versions behind, where the consumer has no limit of its own
_FULL = 0.95  # of a lane's slots or bytes
_MOST_OF_TIME = 0.5
FEW = 12  # lanes of a bridge that are all shown


class Severity(IntEnum):
    """How bad a finding is."""

    FINE = 0
    NOTE = 1
    TROUBLE = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, its severity, and one next action; "" if there is nothing to do."""

    severity: Severity
    text: str
    action: str = ""

    def __str__(self) -> str:
        return f"{self.text} -> {self.action}" if self.action else self.text


def headline(now: BridgeLook, before: BridgeLook | None = None) -> Finding:
    """Returns the worst finding, or what a healthy bridge does. Never blocks."""
    return (findings(now, before) or [Finding(Severity.FINE, _healthy(now, before))])[0]


def findings(now: BridgeLook, before: BridgeLook | None = None) -> list[Finding]:
    """Returns all findings, worst first; none for a healthy bridge. Never blocks.

    Args:
        now: a look.
        before: an earlier one, from which on waiting is measured; None: it is not.
    """
    found = [
        *_room(now),
        *_lanes_given_up(now),
        *_unreadable(now),
        *_consumer(now),
        *_stopped(now),
        *_blocked(now),
        *_without_a_lane(now),
        *_hungry(now),
        *_stale(now),
        *_slow_side(now, before),
        *_full(now),
    ]
    return sorted(found, key=lambda finding: -finding.severity)


def rate(now: BridgeLook, before: BridgeLook | None, lane: LaneLook) -> float | None:
    """Returns records per second of a lane between two looks; None without two.

    A lane that came since had none before. Never blocks.
    """
    if before is None or now.at_s <= before.at_s:
        return None
    earlier = next((each.records for each in before.lanes if each.name == lane.name), 0)
    return (lane.records - earlier) / (now.at_s - before.at_s)


def wait_share(now: BridgeLook, before: BridgeLook | None, lane: LaneLook) -> float | None:
    """Returns the share of the time between two looks in which a lane's puts waited; None without two.

    Never blocks.
    """
    if before is None or now.at_s <= before.at_s:
        return None
    earlier_s = next((each.wait_s for each in before.lanes if each.name == lane.name), 0.0)
    # A sleep is counted when it ends: the one under way is not, and was not in the earlier look.
    waited_s = max(lane.wait_s - earlier_s, lane.blocked_s or 0.0)
    return min(1.0, waited_s / (now.at_s - before.at_s))


def waited_for(now: BridgeLook, before: BridgeLook | None) -> dict[str, float] | None:
    """Returns for each side the share of the time between two looks in which the other waited for it.

    None without two looks at one living consumer. As `shmbridge.metrics.waiting_shares`; a stopped producer
    waits for no one. Never blocks.
    """
    if before is None or now.consumer is None or before.consumer is None:
        return None
    if now.consumer.pid != before.consumer.pid:
        return None
    seconds = now.at_s - before.at_s
    shares = [wait_share(now, before, lane) or 0.0 for lane in _running(now)]
    earlier = {"batch_wait_s": before.consumer.batch_wait_s, "tap_wait_s": before.consumer.tap_wait_s}
    later = {
        "batch_wait_s": now.consumer.batch_wait_s,
        "tap_wait_s": now.consumer.tap_wait_s,
        "producer_wait_s": sum(shares) * seconds,
        "lanes_live": len(shares),
    }
    return waiting_shares(earlier, later, seconds)


def in_words(seconds: float) -> str:
    """Returns an age in words: 0.4 s, 12 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 1 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _living(now: BridgeLook) -> list[LaneLook]:
    return [lane for lane in now.lanes if lane.state is not State.DEAD]


def _running(now: BridgeLook) -> list[LaneLook]:
    return [lane for lane in _living(now) if lane.state is not State.STOPPED]


def _asking_s(now: BridgeLook) -> float:
    """Seconds the consumer has waited for a batch or record; 0 while that is at most LONG_S."""
    asking_s = 0.0 if now.consumer is None else now.consumer.asking_s or 0.0
    return asking_s if asking_s > LONG_S else 0.0


def _consumer(now: BridgeLook) -> Iterable[Finding]:
    """The consumer: gone, stopped, pausing, draining."""
    if not now.is_consumer_known:
        return
    living = _living(now)
    if now.consumer is None:
        held = f"{counted(now.held, 'record')} {'waits' if now.held == 1 else 'wait'}"
        text = f"no consumer: {held}, and {counted(len(living), 'environment')} {_live(len(living))}"
        if not now.held and not living:
            yield Finding(Severity.NOTE, text, f"shmbridge clean {now.name} --yes")
        else:
            yield Finding(Severity.TROUBLE, text, "start a learner on this bridge")
        return
    if now.consumer.state is State.STOPPED:
        yield Finding(
            Severity.TROUBLE,
            f"the learner is stopped (pid {now.consumer.pid}){_since_batch(now.consumer)}",
            f"kill -CONT {now.consumer.pid}",
        )
    if now.consumer.paused:
        yield Finding(Severity.NOTE, "the consumer holds environments back: it is paused")
    if now.consumer.draining:
        yield Finding(Severity.NOTE, "the bridge drains: it takes no new records")


def _stopped(now: BridgeLook) -> Iterable[Finding]:
    """Environments that are stopped by a signal: they put nothing, and wait for nothing."""
    if stopped := [lane for lane in now.lanes if lane.state is State.STOPPED]:
        yield Finding(
            Severity.TROUBLE,
            f"{_learner_waits(now)}{len(stopped)} of {len(_living(now))} {_are(len(stopped))} stopped: "
            f"{_names(stopped)}",
            f"kill -CONT {' '.join(str(lane.pid) for lane in stopped[:_NAMED])}",
        )


def _blocked(now: BridgeLook) -> Iterable[Finding]:
    """Environments that have had no room for long."""
    if now.consumer is None or now.consumer.paused or now.consumer.state is State.STOPPED:
        return
    running = _running(now)
    if blocked := [lane for lane in running if (lane.blocked_s or 0.0) > LONG_S]:
        action = "make its step quicker, or its lanes larger"
        if _asking_s(now):
            action = "release what the learner holds of earlier batches, or make its lanes larger"
        yield Finding(
            Severity.TROUBLE,
            f"environments wait for the learner: {len(blocked)} of {len(running)} "
            f"{'has' if len(blocked) == 1 else 'have'} no room, for "
            f"{in_words(max(lane.blocked_s or 0.0 for lane in blocked))}{_since_batch(now.consumer)}",
            action,
        )


def _without_a_lane(now: BridgeLook) -> Iterable[Finding]:
    """Environments that the consumer does not read, beside others that it does."""
    if now.waiting:
        read = sum(lane.read for lane in now.lanes)
        yield Finding(
            Severity.TROUBLE,
            f"{len(now.waiting)} of {len(now.lanes)} environments {_wait(len(now.waiting))} for a lane: "
            f"the consumer reads {read} at once",
            "start it with a higher --lanes, or Consumer(lanes=)",
        )


def _hungry(now: BridgeLook) -> Iterable[Finding]:
    """A learner that has waited for long, for environments that are not stopped."""
    if (waits := _learner_waits(now)) and len(_running(now)) == len(_living(now)):
        text, action = _cause(now)
        yield Finding(Severity.TROUBLE, f"{waits}{text}", action)


def _learner_waits(now: BridgeLook) -> str:
    """Returns that the learner has waited for long, what it has of its batch, and a colon; else ""."""
    if not (asking_s := _asking_s(now)) or now.consumer is None:
        return ""
    waited, there = in_words(asking_s), now.consumer
    if there.wanted:
        thing = "rows" if there.wanted_rows else "groups"
        waited += f", {there.there} of {there.wanted} {thing} are there"
        waited += f" and {there.in_part} in part" if there.in_part else ""
    return f"the learner waits for environments ({waited}): "


def _cause(now: BridgeLook) -> tuple[str, str]:
    """Returns why a learner that waits gets nothing, and one next action."""
    consumer, living = now.consumer, _living(now)
    if consumer is not None and consumer.paused:
        return "they are paused by the consumer", "Consumer.resume()"
    if not now.had_lanes:
        return "no producer has ever come", "start environments on this bridge"
    if not living:
        return "no producer is alive any more", "start environments on this bridge"
    if not any(lane.read for lane in living):
        lanes = "the one lane" if len(living) == 1 else f"any of {len(living)} lanes"
        return f"the consumer does not read {lanes}", "its log says why"
    if consumer is not None and 0 < consumer.wanted <= consumer.there:
        return (
            "the batch is kept for environments that are promised a part of it",
            "look at those, or lower Consumer(allocation_wait_s=)",
        )
    slowest = max(living, key=lambda lane: float("inf") if lane.newest_age_s is None else lane.newest_age_s)
    age = slowest.newest_age_s
    last = "has put nothing yet" if age is None else f"put last {in_words(age)} ago"
    return (
        f"the slowest of {len(living)}, {slowest.env_name or slowest.producer_id}, {last}",
        "look at that environment, or start more",
    )


def _stale(now: BridgeLook) -> Iterable[Finding]:
    """Environments whose newest record is too old for the policy."""
    limit = None if now.consumer is None else now.consumer.max_staleness
    most, running = _MOST_LAG if limit is None else limit, _running(now)
    if late := [lane for lane in running if (now.lag(lane) or 0) > most + _is_trained(now, lane)]:
        late.sort(key=lambda lane: -(now.lag(lane) or 0))
        allowed = "and no max_staleness is set" if limit is None else f"and max_staleness is {limit}"
        yield Finding(
            Severity.TROUBLE,
            f"{len(late)} of {len(running)} environments {_are(len(late))} up to "
            f"{counted(now.lag(late[0]) or 0, 'version')} behind, {allowed}: {_names(late)}",
            "let fewer groups wait: --tickets of the environments, or smaller lanes"
            + ("; set max_staleness" if limit is None else "; or raise max_staleness"),
        )


def _is_trained(now: BridgeLook, lane: LaneLook) -> bool:
    """Whether the lane's newest record may be in the newest version's last step, and so be one behind."""
    is_older = (lane.newest_age_s or 0.0) >= (now.published_age_s or 0.0)
    return not lane.untaken and is_older


def _full(now: BridgeLook) -> Iterable[Finding]:
    """Lanes without room beside a living consumer, and whether bytes or slots are their limit."""
    living = _living(now)
    if now.consumer is None or not (full := [lane for lane in living if lane.fill >= _FULL]):
        return
    fullest = max(full, key=lambda lane: lane.fill)
    by_slots, by_bytes = fullest.fill_slots >= _FULL, fullest.fill_bytes >= _FULL
    limit = "slots and bytes" if by_slots and by_bytes else "slots" if by_slots else "bytes"
    yield Finding(
        Severity.NOTE,
        f"{len(full)} of {counted(len(living), 'lane')} {_are(len(full))} full of {limit} "
        f"(slots {fullest.fill_slots:.0%}, bytes {fullest.fill_bytes:.0%}): {_names(full)}",
        "make the learner's step quicker; a larger lane_bytes has more of both",
    )


def _slow_side(now: BridgeLook, before: BridgeLook | None) -> Iterable[Finding]:
    """The side that the other waited for most of the time between two looks."""
    shares = waited_for(now, before)
    if shares is None or before is None or now.consumer is None or now.consumer.draining:
        return
    of_time = {side: f"{share:.0%} of {in_words(now.at_s - before.at_s)}" for side, share in shares.items()}
    if shares["environments"] > _MOST_OF_TIME and not _asking_s(now):
        text, action = _cause(now)
        sentence = f"the environments are the slow side: the learner waited {of_time['environments']}; {text}"
        yield Finding(Severity.NOTE, sentence, action)
    if shares["learner"] > _MOST_OF_TIME and not now.consumer.paused and not list(_blocked(now)):
        yield Finding(
            Severity.NOTE,
            f"the learner is the slow side: environments waited for room {of_time['learner']}"
            f"{_since_batch(now.consumer)}",
            "make its step quicker; more environments do not help",
        )
    if shares["tap"] > _MOST_OF_TIME:
        yield Finding(
            Severity.NOTE,
            f"the recording is the slow side: the learner waited for it {of_time['tap']}",
            "record to a faster disk, or record less",
        )


def _room(now: BridgeLook) -> Iterable[Finding]:
    if now.mount_bytes and now.mount_free < min(_SMALL, _LITTLE * now.mount_bytes):
        yield Finding(
            Severity.TROUBLE,
            f"shared memory is full: {format_size(now.mount_free)} free of {format_size(now.mount_bytes)}",
            "shmbridge clean --yes, lower lane_bytes, or a larger mount (docker run --shm-size)",
        )


def _lanes_given_up(now: BridgeLook) -> Iterable[Finding]:
    if given_up := [lane for lane in now.lanes if lane.quarantined]:
        yield Finding(
            Severity.TROUBLE,
            f"{counted(len(given_up), 'lane')} {_are(len(given_up))} quarantined, memory was overwritten: "
            f"{_names(given_up)}",
            "end these environments and look for what writes into their memory",
        )


def _unreadable(now: BridgeLook) -> Iterable[Finding]:
    if not now.unreadable:
        return
    name, why = next(iter(now.unreadable.items()))
    more = len(now.unreadable) - 1
    yield Finding(
        Severity.TROUBLE,
        f"{counted(more + 1, 'segment')} cannot be read from here: {name}, {why}"
        + (f", and {more} more" if more else ""),
        "install one version of shmbridge everywhere"
        if "layout" in why
        else "look for what writes into its memory"
        if "[SB" not in why and "Errno" not in why
        else "",
    )


def _healthy(now: BridgeLook, before: BridgeLook | None) -> str:
    rates = [per_s for lane in now.lanes if (per_s := rate(now, before, lane)) is not None]
    speed = f", {sum(rates):.1f} records/s" if rates else ""
    living = sum(lane.state is not State.DEAD for lane in now.lanes)
    if not living:
        return (
            "healthy: no environment is alive yet"
            if not now.lanes
            else "healthy: no environment is alive any more"
        )
    return f"healthy: {counted(living, 'environment')}{speed}, {counted(now.held, 'record')} held"


def _since_batch(consumer: ConsumerLook) -> str:
    age = consumer.handed_age_s
    return "" if age is None else f"; its last batch is {in_words(age)} old"


def _names(lanes: list[LaneLook]) -> str:
    named = ", ".join(
        f"{lane.env_name or lane.producer_id} (pid {lane.pid}"
        + (")" if lane.newest_age_s is None else f", last put {in_words(lane.newest_age_s)} ago)")
        for lane in lanes[:_NAMED]
    )
    return named + (f" and {len(lanes) - _NAMED} more" if len(lanes) > _NAMED else "")


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _live(number: int) -> str:
    return "lives" if number == 1 else "live"


def _wait(number: int) -> str:
    return "waits" if number == 1 else "wait"


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
