"""Whether a new producer's columns agree in type with all others of its bridge."""

from shmbridge._ext import header
from shmbridge.errors import SchemaMismatch
from shmbridge.schema import Columns
from shmbridge.segments import membership, segment


def check_agrees_with_bridge(columns: Columns, control: header.Control, bridge: str) -> None:
    """Raises SchemaMismatch if the consumer or another producer has a column of another type."""
    columns.check_agrees(Columns.decode(control.columns), "in this producer", "in the consumer")
    for name in segment.lane_names(bridge):
        if (info := membership.lane_header(name)) is not None:
            try:
                peer = Columns.decode(info["columns"])
            except SchemaMismatch:  # a lane this build cannot read: the consumer refuses it
                continue
            columns.check_agrees(peer, "in this producer", f"in producer {info['producer_id']}")
