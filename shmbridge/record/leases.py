"""What the bridge and its adapters need of a leased record, and users do not: its lane, and an end without
release.
"""

from collections.abc import Iterable

from shmbridge.record.record import Record
from shmbridge.schema import Columns
from shmbridge.segments import map_data_writable


def abandon(records: Iterable[Record]) -> None:
    """Ends leases without release, whatever views live: the next consumer gets the records again.

    Never blocks, idempotent.
    """
    for record in records:
        record._abandon()


def lane_name(record: Record) -> str:
    """Returns the name of the segment that holds a record."""
    return record._lane.name


def lane_columns(record: Record) -> Columns:
    """Returns all columns that a record's lane may carry, by name."""
    return record._lane_columns


def lane_memory(record: Record) -> memoryview:
    """Returns the whole segment of a record's lane, read-only, to register with a device.

    It keeps the mapping, and no lease. BufferError in a child of fork.
    """
    return memoryview(record._lane_reader.lane).toreadonly()


def map_lane_writable(record: Record) -> None:
    """Maps the data of a record's lane writable here, for a device that cannot register read-only memory;
    logs it.

    Shown by `inspect`. Never blocks. Raises OSError if the kernel refuses.
    """
    map_data_writable(record._lane_reader.lane, lane_name(record))
