"""A bridge as a document for programs: as it is listed, or as one look sees it."""

from dataclasses import asdict
from itertools import groupby

from shmbridge.segments import BridgeInfo
from shmbridge.watch.diagnosis import findings, headline
from shmbridge.watch.rows import Row, lane_rows, losses, summed
from shmbridge.watch.snapshot import BridgeLook, look


def of_listing(info: BridgeInfo) -> dict[str, object]:
    """Returns a bridge as `list_bridges()` has it, and its findings, for JSON. Never blocks."""
    now = look(info.name)
    return asdict(info) | {"findings": [] if now is None else _findings(now)}


def of_look(now: BridgeLook, before: BridgeLook | None = None) -> dict[str, object]:
    """Returns a look as numbers and text, for JSON: words, consumer, lanes, sums per environment.

    Never blocks.

    Args:
        now, before: two looks; without an earlier one, rates and waits are null.
    """
    lanes = lane_rows(now, before)
    return {
        "bridge": now.name,
        "at_s": now.at_s,
        "headline": str(headline(now, before)),
        "findings": _findings(now, before),
        "consumer": None if now.consumer is None else asdict(now.consumer),
        "policy_version": now.policy_version,
        "published_age_s": now.published_age_s,
        "mount_free": now.mount_free,
        "mount_bytes": now.mount_bytes,
        "losses": losses(now),
        "unreadable": now.unreadable,
        "environments": [
            _row(summed(env_name, list(each))) for env_name, each in groupby(lanes, lambda row: row.env_name)
        ],
        "lanes": [
            _row(row)
            | {"tokens": lane.tokens, "records": lane.records, "bytes": lane.bytes}
            | {"logprobs_unrecorded": lane.logprobs_unrecorded}
            | {"dropped": lane.dropped, "discarded": lane.discarded, "episodes_lost": lane.episodes_lost}
            for row, lane in zip(lanes, now.lanes, strict=True)
        ],
    }


def _findings(now: BridgeLook, before: BridgeLook | None = None) -> list[dict[str, str]]:
    return [
        {"severity": each.severity.name, "text": each.text, "action": each.action}
        for each in findings(now, before)
    ]


def _row(row: Row) -> dict[str, object]:
    return asdict(row) | {"fill": row.fill}
