"""Says in one sentence what is wrong with a bridge, worst first, with one next action.

`findings` returns all that is wrong; `headline` is the worst of it, or what a healthy bridge does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from shmbridge.config import format_size
from shmbridge.metrics import waiting_shares
from shmbridge.watch.processes import State
from shmbridge.watch.snapshot import BridgeLook, ConsumerLook, LaneLook

LONG_S = 5.0  # a wait shorter than this is nobody's trouble
_LITTLE = 0.05  # of the mount
_SMALL = 64 << 20  # bytes: a lane's usual size
_NAMED = 3  # environments named in one sentence


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
    return (findings(now) or [Finding(Severity.FINE, _healthy(now, before))])[0]


def findings(now: BridgeLook) -> list[Finding]:
    """Returns all findings, worst first; none for a healthy bridge. Never blocks."""
    found = [*_room(now), *_lanes_given_up(now), *_unreadable(now), *_consumer(now), *_environments(now)]
    return sorted(found, key=lambda finding: -finding.severity)


def rate(now: BridgeLook, before: BridgeLook | None, lane: LaneLook) -> float | None:
    """Returns records per second of a lane between two looks; None without two.

    A lane that came since had none before. Never blocks.
    """
    if before is None or now.at_s <= before.at_s:
        return None
    earlier = next((each.records for each in before.lanes if each.name == lane.name), 0)
    return (lane.records - earlier) / (now.at_s - before.at_s)


def waited_for(now: BridgeLook, before: BridgeLook | None) -> dict[str, float] | None:
    """Returns for each side the share of the time between two looks in which the other waited for it.

    None without two looks at one living consumer. As `shmbridge.metrics.waiting_shares`. Never blocks.
    """
    if before is None or now.consumer is None or before.consumer is None:
        return None
    if now.consumer.pid != before.consumer.pid:
        return None
    return waiting_shares(_waits(before), _waits(now), now.at_s - before.at_s)


def _waits(look: BridgeLook) -> dict[str, float]:
    living = [lane for lane in look.lanes if lane.state is not State.DEAD]
    return {
        "batch_wait_s": look.consumer.batch_wait_s if look.consumer is not None else 0.0,
        "tap_wait_s": look.consumer.tap_wait_s if look.consumer is not None else 0.0,
        "producer_wait_s": sum(lane.wait_s for lane in living),
        "lanes_live": len(living),
    }


def in_words(seconds: float) -> str:
    """Returns an age as people say it: 0.4 s, 12 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 1 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def count(number: int, thing: str) -> str:
    """Returns a number of things: 1 lane, 2 lanes."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _consumer(now: BridgeLook) -> list[Finding]:
    """The learner's side: gone, stopped, slow, or waiting."""
    living = [lane for lane in now.lanes if lane.state is not State.DEAD]
    if not now.is_consumer_known:
        return []
    if now.consumer is None:
        held = f"{count(now.held, 'record')} {'waits' if now.held == 1 else 'wait'}"
        text = f"no consumer: {held}, and {count(len(living), 'environment')} {_live(len(living))}"
        if not now.held and not living:
            return [Finding(Severity.NOTE, text, f"shmbridge clean {now.name} --yes")]
        return [Finding(Severity.TROUBLE, text, "start a learner on this bridge")]
    found = []
    if now.consumer.state is State.STOPPED:
        found.append(
            Finding(
                Severity.TROUBLE,
                f"the learner is stopped (pid {now.consumer.pid}){_since_batch(now.consumer)}",
                f"kill -CONT {now.consumer.pid}",
            )
        )
    elif blocked := [lane for lane in living if (lane.blocked_s or 0) > LONG_S and not now.consumer.paused]:
        found.append(
            Finding(
                Severity.TROUBLE,
                f"environments wait for the learner: {len(blocked)} of {len(living)} "
                f"{'has' if len(blocked) == 1 else 'have'} no room, for "
                f"{in_words(max(lane.blocked_s or 0 for lane in blocked))}{_since_batch(now.consumer)}",
                "make its step quicker, or its lanes larger",
            )
        )
    if now.consumer.paused:
        found.append(Finding(Severity.NOTE, "the consumer holds environments back: it is paused"))
    if now.consumer.draining:
        found.append(Finding(Severity.NOTE, "the bridge drains: it takes no new records"))
    return found


def _environments(now: BridgeLook) -> list[Finding]:
    """The environments' side: stopped, too many for the lanes, or too slow for the learner."""
    living = [lane for lane in now.lanes if lane.state is not State.DEAD]
    stopped = [lane for lane in living if lane.state is State.STOPPED]
    asking = 0.0 if now.consumer is None else now.consumer.asking_s or 0.0
    waits = f"the learner waits for environments ({in_words(asking)}): " if asking > LONG_S else ""
    found = []
    if stopped:
        found.append(
            Finding(
                Severity.TROUBLE,
                f"{waits}{len(stopped)} of {len(living)} {_are(len(stopped))} stopped: {_names(stopped)}",
                f"kill -CONT {' '.join(str(lane.pid) for lane in stopped[:_NAMED])}",
            )
        )
    if now.waiting:
        read = sum(lane.read for lane in now.lanes)
        found.append(
            Finding(
                Severity.TROUBLE,
                f"{len(now.waiting)} of {len(now.lanes)} environments {_wait(len(now.waiting))} for a lane: "
                f"the consumer reads {read} at once",
                "start it with a higher --lanes, or Consumer(lanes=)",
            )
        )
    if waits and not stopped:
        found.append(_slow(now, living, waits))
    return found


def _slow(now: BridgeLook, living: list[LaneLook], waits: str) -> Finding:
    if not living:
        return Finding(Severity.TROUBLE, f"{waits}none is alive", "start environments on this bridge")
    slowest = max(living, key=lambda lane: float("inf") if lane.newest_age_s is None else lane.newest_age_s)
    age = slowest.newest_age_s
    last = "has put nothing yet" if age is None else f"put last {in_words(age)} ago"
    return Finding(
        Severity.TROUBLE,
        f"{waits}the slowest of {len(living)}, {slowest.env_name or slowest.producer_id}, {last}",
        "look at that environment, or start more",
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
            f"{count(len(given_up), 'lane')} {_are(len(given_up))} quarantined, memory was overwritten: "
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
        f"{count(more + 1, 'segment')} cannot be read from here: {name}, {why}"
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
    return f"healthy: {count(living, 'environment')}{speed}, {count(now.held, 'record')} held"


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


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _live(count: int) -> str:
    return "lives" if count == 1 else "live"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"
