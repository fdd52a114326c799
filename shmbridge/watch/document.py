"""One look at a bridge as a document for programs: words, consumer, lanes, sums per environment."""

from dataclasses import asdict
from itertools import groupby

from shmbridge.watch.diagnosis import findings, headline
from shmbridge.watch.rows import Row, lane_rows, losses, summed
from shmbridge.watch.snapshot import BridgeLook


def document(now: BridgeLook, before: BridgeLook | None = None) -> dict[str, object]:
    """Returns a look as numbers and text, for JSON. Never blocks.

    Args:
        now, before: two looks; without an earlier one, rates and waits are null.
    """
    lanes = lane_rows(now, before)
    return {
        "bridge": now.name,
        "at_s": now.at_s,
        "headline": str(headline(now, before)),
        "findings": [
            {"severity": each.severity.name, "text": each.text, "action": each.action}
            for each in findings(now)
        ],
        "consumer": None if now.consumer is None else asdict(now.consumer),
        "policy_version": now.policy_version,
        "published_age_s": now.published_age_s,
        "mount_free": now.mount_free,
        "mount_bytes": now.mount_bytes,
        "losses": losses(now),
        "environments": [
            _row(summed(env_name, list(each))) for env_name, each in groupby(lanes, lambda row: row.env_name)
        ],
        "lanes": [
            _row(row)
            | {"tokens": lane.tokens, "records": lane.records, "bytes": lane.bytes}
            | {"dropped": lane.dropped, "discarded": lane.discarded}
            for row, lane in zip(lanes, now.lanes, strict=True)
        ],
    }


def _row(row: Row) -> dict[str, object]:
    return asdict(row) | {"fill": row.fill}
