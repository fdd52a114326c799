"""A leased record as a relay sends it to another node: its own memory, and the words of its slot.

`shmbridge/put/relayed.py` is the other end.
"""

import time
from dataclasses import dataclass

from shmbridge.record.record import Record


@dataclass(frozen=True, slots=True)
class RecordMemory:
    """One record's bytes in its lane, read-only and not copied, and what a lane elsewhere needs beside them.

    Args:
        memory: all of them; the record's lease lasts until its release() and the end of the last view.
        words: rows, columns, index_bytes, group_id_bytes, flags, tokens, group_size: of its slot.
        min_policy_version, max_policy_version: -1 where none was stamped.
        sequence: of the record in its lane.
        t_publish_ns: when it was committed, CLOCK_MONOTONIC of this node.
    """

    memory: memoryview
    words: tuple[int, int, int, int, int, int, int]
    min_policy_version: int
    max_policy_version: int
    sequence: int
    t_publish_ns: int

    def waited_ns(self) -> int:
        """Returns the nanoseconds since its commit, by this node's clock."""
        return time.monotonic_ns() - self.t_publish_ns


def memory_of(record: Record) -> RecordMemory:
    """Returns a record as it is sent. Never blocks; for the record's thread.

    Raises BufferError if its lease has ended.
    """
    return RecordMemory(
        memoryview(record),
        record._slot_words,
        record._min_policy_version,
        record._max_policy_version,
        record._sequence,
        record._t_publish_ns,
    )


def table_of(record: Record) -> bytes:
    """Returns the column table of the record's lane, which is the same for all records of that lane."""
    return record._lane_columns.encode()
