"""Lists and cleans the shared-memory mount: list_bridges() and clean(). Never touches live segments."""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from shmbridge._ext import header
from shmbridge._ext import weights as versions
from shmbridge._ext.weights import Versions
from shmbridge.config import check_bridge_name
from shmbridge.errors import ShmBridgeError, ShmPermission
from shmbridge.segments import locks, membership, receipts, segment
from shmbridge.segments.locks import LockByte
from shmbridge.segments.membership import CleanReport as CleanReport

_OWN_LANE = re.compile(r"-([0-9a-f]{16})$")  # the end of a producer's id


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """One lane as seen from outside.

    `held` counts committed, un-released records, `dropped` those of them that its consumer has dropped
    without release; `size_bytes` is the whole segment.

    `released` is counted by its consumers; `unaccounted` is the number released beyond that, as the lane's
    slots show: 0, except at most one between a consumer's death and the next consumer, unless a record was
    lost; None if the lane was too busy to tell. `data_writable`: a reader maps its data writable, for a GPU.
    `origin_node` is the node from which a relay brings its records, "" for a producer here.
    """

    name: str
    producer_id: str
    env_name: str
    pid: int
    alive: bool
    held: int
    records: int
    size_bytes: int
    dropped: int = 0
    released: int = 0
    unaccounted: int | None = 0
    data_writable: bool = False
    origin_node: str = ""


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """The weights of a bridge as seen from outside.

    `version` is None before the first, `writer_pid` is None when no writer is alive.
    """

    version: int | None
    writer_pid: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BridgeInfo:
    """One bridge as seen from outside.

    `consumer_pid` is None when no consumer is alive; `policy_version` -1 before the first.

    `weights` is None if no version was ever begun. `waiting` names the lanes for which the living consumer
    has no room yet. `receipts` counts lanes of other nodes' records that are gone, and whose last record a
    relay may have to know: all that is left of a bridge may be these.

    `trained_version` is the version whose weights the newest one has, if these can hold a trained step, and
    `run_id` the training run of the versions, "" if its learner stored none.
    """

    name: str
    consumer_pid: int | None
    participants: bool
    policy_version: int
    lanes: list[LaneInfo]
    weights: WeightsInfo | None
    waiting: list[str] = field(default_factory=list)
    receipts: int = 0
    run_id: str = ""
    trained_version: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all its lanes."""
        return sum(lane.size_bytes for lane in self.lanes)


def list_bridges() -> list[BridgeInfo]:
    """Returns all bridges of this user's mount, by name. Never blocks, changes nothing."""
    return [_bridge(name) for name in segment.bridges()]


def unreleased(producers: Iterable[str]) -> dict[str, set[int]]:
    """Returns the sequences of each producer's committed, un-released records, by `producer_id`, on any
    bridge.

    Never blocks, changes nothing.

    Empty for a producer whose lane is gone. A producer is left out if its state is unknown: its lane cannot
    be read, or its id does not name one.
    """
    own = {producer: match[1] for producer in producers if (match := _OWN_LANE.search(producer))}
    try:
        lanes = (
            {lane.rpartition(".")[2]: lane for name in segment.bridges() for lane in segment.lane_names(name)}
            if own
            else {}
        )
    except OSError:  # for example no descriptor left
        return {}
    found = {
        producer: set[int]() if lane not in lanes else _unreleased(lanes[lane])
        for producer, lane in own.items()
    }
    return {producer: sequences for producer, sequences in found.items() if sequences is not None}


def _unreleased(lane: str) -> set[int] | None:
    try:
        mapping = segment.open_mapping(lane, readonly=True)
        return None if mapping is None else set(header.unreleased(mapping))
    except (OSError, ShmBridgeError, header.LaneCorrupt):
        return None


def _bridge(name: str) -> BridgeInfo:
    lanes = [lane for lane in map(lane_info, segment.lane_names(name)) if lane is not None]
    mapping = segment.open_mapping(segment.control_name(name), readonly=True, minimum=header.control_bytes)
    left, weights = len(segment.receipt_names(name)), _weights(name)
    if mapping is None:
        trained = None if weights is None else weights.version or None  # whether by a step is not known
        return BridgeInfo(name, None, False, -1, lanes, weights, receipts=left, trained_version=trained)
    control = header.Control(mapping)
    alive = locks.is_locked(mapping.fd, LockByte.HUB)
    participants = locks.is_locked(mapping.fd, LockByte.PARTICIPANTS)
    pid, waiting = control.hub_pid if alive else None, _waiting(lanes) if alive else []
    run_id = f"{control.run_id:016x}" if control.run_id else ""
    return BridgeInfo(
        name,
        pid,
        participants,
        control.policy_version,
        lanes,
        weights,
        waiting,
        left,
        run_id,
        membership.trained_version(control, None if weights is None else weights.version),
    )


def _waiting(lanes: list[LaneInfo]) -> list[str]:
    """Returns lanes with a living producer or with records that a consumer reading other lanes does not
    read.
    """
    unread = [lane for lane in lanes if not _is_read(lane.name)]
    return [lane.name for lane in unread if lane.alive or lane.held] if len(unread) < len(lanes) else []


def _is_read(lane: str) -> bool:
    mapping = segment.open_mapping(lane, readonly=True)
    return mapping is not None and locks.is_locked(mapping.fd, LockByte.READER)


def _weights(bridge: str) -> WeightsInfo | None:
    try:
        mapping = segment.open_mapping(
            segment.weights_name(bridge), readonly=True, minimum=versions.header_bytes
        )
    except ShmPermission:
        return None
    if mapping is None:
        return None
    found = Versions(mapping)
    latest = found.latest if found.ready else None
    writer = found.writer_pid if locks.is_locked(mapping.fd, LockByte.WRITER) else None
    return WeightsInfo(None if latest is None else latest[0], writer, mapping.size)


def lane_info(name: str) -> LaneInfo | None:
    """Inspects a lane read-only; None if it is gone, or another user's."""
    try:
        mapping = segment.open_mapping(name, readonly=True)
    except ShmPermission:
        return None
    if mapping is None:
        return None
    alive = locks.is_locked(mapping.fd, LockByte.PRODUCER)
    writable = locks.is_locked(mapping.fd, LockByte.WRITABLE_DATA)
    info, held, dropped, records, released = None, 0, 0, 0, 0
    shown: int | None = 0
    with contextlib.suppress(header.LaneCorrupt):
        info = header.read_lane(mapping)
        held = header.undelivered(mapping)
        if info:
            words = header.lane_counters(mapping)
            dropped, records = words["leases_dropped"], words["tail"]
        released, shown = header.releases(mapping)
    said = info or {"producer_id": "", "env_name": "", "pid": 0, "origin_node": ""}
    return LaneInfo(
        name,
        said["producer_id"],
        said["env_name"],
        said["pid"],
        alive,
        held,
        records,
        mapping.size,
        dropped,
        released,
        unaccounted=None if shown is None else shown - released,
        data_writable=writable,
        origin_node=said["origin_node"],
    )


def clean(bridge: str | None = None, dry_run: bool = True) -> CleanReport:
    """Removes every segment that no living process uses, undelivered records included; with `dry_run` only
    reports them.

    Never blocks, never touches a live lane, or the control segment of a bridge that has participants.

    Args:
        bridge: one bridge, or None for all.
        dry_run: only report.
    """
    report = CleanReport(dry_run)
    for name in segment.bridges() if bridge is None else [check_bridge_name(bridge)]:
        swept = membership.sweep(name, with_records=True, dry_run=dry_run)
        report.removed += swept.removed
        report.kept.update(swept.kept)
        report.undelivered.update(swept.undelivered)
        report.trained.update(swept.trained)
        _forget_receipts(name, report)
        _forget_gateway(name, report)
    return report


def _forget_receipts(bridge: str, report: CleanReport) -> None:
    """Removes the receipts of a dead bridge; only here, because a relay that comes back needs them."""
    for name in segment.receipt_names(bridge):
        if kept := segment.foreign_owner(name) or report.kept.get(segment.control_name(bridge)):
            report.kept[name] = kept
        elif report.dry_run or receipts.remove_one(name):
            report.removed.append(name)


def _forget_gateway(bridge: str, report: CleanReport) -> None:
    """Removes a gateway's saved state with the rest of a dead bridge; only here, because a restarted gateway
    needs it.
    """
    folder = segment.gateway_directory(bridge)
    if segment.stands_there(f"/{folder.name}") != "other":
        return
    if kept := segment.foreign_owner(f"/{folder.name}") or report.kept.get(segment.control_name(bridge)):
        report.kept[f"/{folder.name}"] = kept
        return
    report.removed.append(f"/{folder.name}")
    if not report.dry_run:
        segment.remove_folder(folder)
