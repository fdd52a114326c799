"""One look at a bridge from outside: its consumer, its lanes, their processes, the room on the mount.

`look(bridge)` reads words that their owners keep for themselves, so it disturbs no process. Each word is true
when it is read; together they are of moments some microseconds apart.
"""

import contextlib
import os
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from shmbridge._ext import header
from shmbridge.config import check_bridge_name
from shmbridge.errors import Discard, Drop, Lost, ShmBridgeError
from shmbridge.segments import (
    MOUNT,
    LockByte,
    bridge_names,
    control_name,
    is_locked,
    is_own_namespace,
    lane_names,
    open_mapping,
)

_UNREADABLE = (OSError, ShmBridgeError, header.LaneCorrupt)


class State(StrEnum):
    """The state of a process, as far as it can be seen from here."""

    RUNNING = "running"  # also asleep
    STOPPED = "stopped"  # by a signal or a debugger
    DEAD = "dead"
    UNKNOWN = "unknown"  # its pid means nothing here


def state_of(pid: int, namespace: int, *, alive: bool) -> State:
    """Returns the state of a process. Never blocks.

    Args:
        pid: in its own pid namespace.
        namespace: that namespace, as `pid_namespace`.
        alive: whether the kernel lock of its lane or hub is held; this alone proves life.
    """
    if not alive:
        return State.DEAD
    if not is_own_namespace(namespace):
        return State.UNKNOWN
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return State.UNKNOWN  # the lock is held by another process than the one that took it
    return State.STOPPED if letter in "Tt" else State.RUNNING


@dataclass(frozen=True, slots=True)
class LaneLook:
    """One lane. Counters are since the lane's beginning, ages are seconds before the look."""

    name: str  # of the segment
    producer_id: str
    env_name: str
    pid: int
    state: State
    read: bool  # a consumer has taken it over
    records: int  # committed
    released: int  # read and released
    tokens: int
    bytes: int
    held: int  # committed and not released
    held_bytes: int
    data_bytes: int
    segment_bytes: int
    slot_count: int
    newest_age_s: float | None  # of the last put; None: none yet
    oldest_age_s: float | None  # of the oldest held record
    newest_version: int | None  # smallest policy version of the last put; None: not stamped
    wait_s: float  # slept for room
    blocked_s: (
        float | None
    )  # since when a put waits for room or the end of a pause; None: none that runs does
    dropped: dict[str, int]  # by reason: never committed
    discarded: dict[str, int]  # by reason: released unread, or given up with the lane
    leases_dropped: int
    quarantined: bool
    origin_node: str = ""  # from which a relay brings its records; "": from none
    untaken: int = 0  # committed records that no consumer has taken yet
    logprobs_unrecorded: int = 0  # log-probabilities marked "not recorded", also of untrained tokens
    episodes_lost: dict[str, int] = field(default_factory=dict)  # by reason: in no record

    @property
    def fill_bytes(self) -> float:
        """The share of its bytes that records hold, 0 to 1."""
        return self.held_bytes / max(self.data_bytes, 1)

    @property
    def fill_slots(self) -> float:
        """The share of its slots that records hold, 0 to 1."""
        return self.held / max(self.slot_count, 1)

    @property
    def fill(self) -> float:
        """The fuller of its bytes and its slots, 0 to 1."""
        return max(self.fill_bytes, self.fill_slots)


@dataclass(frozen=True, slots=True)
class ConsumerLook:
    """The consumer of a bridge. Ages are seconds before the look; None: not yet, or not known."""

    pid: int
    state: State
    handed_age_s: float | None  # since it handed a batch out
    asking_s: float | None  # since when a caller waits for a batch or record; None: none does
    paused: bool
    draining: bool
    batch_wait_s: float  # since it began, callers waited for a batch or record so long, also now
    tap_wait_s: float  # since it began, a tap that records kept it waiting so long
    latency_counts: list[int]  # since it began, records by the time from commit to hand-out: LATENCY_BOUNDS_S
    latency_s: float  # the sum of those times
    max_staleness: int | None = None  # versions, of the batches asked for last; None: no limit
    wanted: int = 0  # size of the batch that is waited for; 0: of none, or not known
    wanted_rows: bool = False  # whether that and `there` are rows; else groups
    there: int = 0  # of the batch that is waited for
    in_part: int = 0  # groups of which some fragments have come


@dataclass(frozen=True, slots=True)
class BridgeLook:
    """A bridge at one moment."""

    name: str
    at_s: float  # CLOCK_MONOTONIC
    consumer: ConsumerLook | None  # None: no living one
    policy_version: int | None
    published_age_s: float | None
    mount_free: int  # bytes
    mount_bytes: int
    lanes: list[LaneLook] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # segments that cannot be read, and why
    had_lanes: bool = True  # whether a producer has ever come; removed lanes count

    @property
    def is_consumer_known(self) -> bool:
        """Whether the control segment, which names the consumer, can be read."""
        return control_name(self.name) not in self.unreadable

    @property
    def waiting(self) -> list[LaneLook]:
        """Lanes that the consumer has no room for, while it reads others."""
        if self.consumer is None or not any(lane.read for lane in self.lanes):
            return []
        return [each for each in self.lanes if not each.read and (each.state is not State.DEAD or each.held)]

    def lag(self, lane: LaneLook) -> int | None:
        """Versions between the newest policy and that of the lane's newest record; None: unknown."""
        if self.policy_version is None or lane.newest_version is None:
            return None
        return max(self.policy_version - lane.newest_version, 0)

    @property
    def held(self) -> int:
        """Records of all lanes that are committed and not released."""
        return sum(lane.held for lane in self.lanes)


def look(bridge: str) -> BridgeLook | None:
    """Returns one look at a bridge; None if there is no such bridge. Never blocks; any thread, any process.

    Raises BadBridgeName.
    """
    if check_bridge_name(bridge) not in bridge_names():
        return None
    now_ns, lanes, unreadable = time.monotonic_ns(), [], {}
    for name in lane_names(bridge):
        try:
            if (lane := _lane(name, now_ns)) is not None:
                lanes.append(lane)
        except _UNREADABLE as wrong:
            unreadable[name] = str(wrong)
    lanes.sort(key=lambda lane: (lane.env_name, lane.producer_id))
    consumer, version, published_age_s, had_lanes = None, None, None, True
    try:
        if (words := _control(bridge)) is not None:
            consumer, version = _consumer(words, now_ns), _version(words)
            published_age_s, had_lanes = _age(words.published_ns, now_ns), bool(lanes) or words.arrivals > 0
    except _UNREADABLE as wrong:
        unreadable[control_name(bridge)] = str(wrong)
    return BridgeLook(
        bridge, now_ns / 1e9, consumer, version, published_age_s, *_mount(), lanes, unreadable, had_lanes
    )


def policy_version(bridge: str) -> int | None:
    """Returns the newest policy version; None if there is no bridge, or none was published. Never blocks."""
    with contextlib.suppress(*_UNREADABLE):
        return None if (words := _control(bridge)) is None else _version(words)
    return None


def _control(bridge: str) -> header.Control | None:
    """Returns the control segment's words; None while there is none. Raises one of _UNREADABLE."""
    mapping = open_mapping(control_name(bridge), readonly=True, minimum=header.control_bytes)
    if mapping is None or not (words := header.Control(mapping)).ready:
        return None
    _check_layout(words.layout_version)
    return words


def _version(words: header.Control) -> int | None:
    version = words.policy_version
    return None if version < 0 else version


def _check_layout(version: int) -> None:
    if version != header.layout_version:
        raise header.LaneCorrupt(f"layout version {version}, this build has {header.layout_version}")


def _consumer(words: header.Control, now_ns: int) -> ConsumerLook | None:
    if not is_locked(words.mapping.fd, LockByte.HUB):
        return None
    asking_s = _age(words.asking_ns, now_ns)
    latency_counts, latency_ns = words.latency
    wanted, wanted_rows, there, in_part = words.batch
    return ConsumerLook(
        words.hub_pid,
        state_of(words.hub_pid, words.hub_pid_namespace, alive=True),
        _age(words.handed_ns, now_ns),
        asking_s,
        words.paused,
        words.draining,
        words.batch_wait_ns / 1e9 + (asking_s or 0.0),
        words.tap_wait_ns / 1e9,
        latency_counts,
        latency_ns / 1e9,
        None if words.most_stale < 0 else words.most_stale,
        wanted,
        wanted_rows,
        there,
        in_part,
    )


def _lane(name: str, now_ns: int) -> LaneLook | None:
    """Returns None for a lane that is gone or not ready. Raises one of _UNREADABLE."""
    mapping = open_mapping(name, readonly=True)
    about = None if mapping is None else header.read_lane(mapping)
    if mapping is None or about is None:
        return None
    _check_layout(about["layout_version"])
    load, words = header.load(mapping), header.lane_counters(mapping)
    discarded = words["discarded"]
    released = max(words["released"] - sum(discarded), 0)
    discarded[Discard.CORRUPT] += words["quarantined"]
    alive = is_locked(mapping.fd, LockByte.PRODUCER)
    state = state_of(about["pid"], about["pid_namespace"], alive=alive)
    return LaneLook(
        name,
        about["producer_id"],
        about["env_name"],
        about["pid"],
        state,
        is_locked(mapping.fd, LockByte.READER),
        words["tail"],
        released,
        words["tokens"],
        words["bytes"],
        load["held"],
        load["held_bytes"],
        load["data_bytes"],
        about["segment_bytes"],
        load["slot_count"],
        _age(load["newest_ns"], now_ns),
        _age(load["oldest_ns"], now_ns),
        None if load["newest_version"] < 0 else load["newest_version"],
        words["wait_ns"] / 1e9,
        _age(words["blocked_ns"], now_ns) if state not in (State.DEAD, State.STOPPED) else None,
        {reason.name.lower(): words["dropped"][reason] for reason in Drop},
        {reason.name.lower(): discarded[reason] for reason in Discard},
        words["leases_dropped"],
        bool(words["quarantined"]),
        about["origin_node"],
        max(words["tail"] - words["head"], 0),
        words["logprobs_unrecorded"],
        {reason.name.lower(): words["episodes_lost"][reason] for reason in Lost},
    )


def _age(stamp_ns: int, now_ns: int) -> float | None:
    return None if stamp_ns == 0 else max(now_ns - stamp_ns, 0) / 1e9


def _mount() -> tuple[int, int]:
    """Returns (free, all) bytes of the mount."""
    try:
        found = os.statvfs(MOUNT)
    except OSError:
        return 0, 0
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
