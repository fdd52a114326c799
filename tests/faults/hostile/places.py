"""Names for the bytes of a lane that others believe: `header.tail`, `slot.2.extent_at`, `entry.2.1.entries`,
`lengths.2.1.0`, `byte.4711`.

Knows the layout (layout.h) and a memory to look into; knows nothing of the package. Used by the child that
scribbles, and to make seeds for the C fuzzer.
"""

import struct
from collections.abc import Iterator, MutableSequence
from typing import Any

PAGE = 4096
COLUMN_BYTES, SLOT_BYTES, ENTRY_BYTES, LINE = 64, 128, 64, 64

# name -> (offset, width)
HEADER = {
    "magic": (0, 8),
    "layout_version": (8, 4),
    "producer_pid": (12, 4),
    "pid_namespace": (16, 8),
    "created_ns": (24, 8),
    "slot_count": (32, 4),
    "column_count": (36, 4),
    "ring_at": (40, 8),
    "slots_at": (48, 8),
    "released_at": (56, 8),
    "data_at": (64, 8),
    "data_bytes": (72, 8),
    "segment_bytes": (80, 8),
    "producer_id": (88, 8),
    "env_name": (184, 8),
    "tail": (0x200, 8),
    "space_waiting": (0x280, 4),
    "bytes_total": (0x288, 8),
    "dropped_total": (0x2A8, 8),
    "wanted_bytes": (0x2C8, 8),
    "head": (0x300, 8),
    "discarded_total": (0x308, 8),
    "quarantined": (0x328, 8),
    "released_total": (0x330, 8),
    "leases_dropped": (0x338, 8),
    "releasing_generation": (0x340, 8),
    "releasing": (0x348, 8),
    "space_bell": (0x400, 4),
}
COLUMN = {
    "name": (0, 8),
    "name_end": (48, 8),
    "kind": (56, 1),
    "dtype": (57, 1),
    "item_bytes": (58, 1),
    "flags": (59, 1),
}
SLOT = {
    "generation": (0, 8),
    "sequence": (8, 8),
    "extent_at": (16, 8),
    "extent_bytes": (24, 8),
    "min_policy_version": (32, 8),
    "max_policy_version": (40, 8),
    "t_created_ns": (48, 8),
    "t_publish_ns": (56, 8),
    "tokens": (64, 8),
    "rows": (72, 4),
    "columns": (76, 4),
    "group_size": (80, 4),
    "env_id": (84, 4),
    "group_id_bytes": (88, 2),
    "flags": (90, 2),
    "index_bytes": (92, 4),
}
ENTRY = {
    "column": (0, 2),
    "kind": (2, 1),
    "tag": (3, 1),
    "entries": (4, 4),
    "values_at": (8, 4),
    "lengths_at": (12, 4),
    "inner_at": (16, 4),
    "keys_at": (20, 4),
    "validity_at": (24, 4),
    "checks_at": (28, 4),
    "values_bytes": (32, 8),
    "inner_count": (40, 8),
    "keys_bytes": (48, 8),
}
# What an entry's `_at` leads to: name of the place -> (field, width of one item).
BEHIND = {
    "lengths": ("lengths_at", 4),
    "inner": ("inner_at", 4),
    "keys": ("keys_at", 1),
    "validity": ("validity_at", 1),
    "checks": ("checks_at", 8),
    "values": ("values_at", 1),
}


class LaneBytes:
    """A lane's memory, as it was when this was made: the places are stored, so that changes do not move the
    names.
    """

    def __init__(self, memory: MutableSequence[Any] | Any, records: int) -> None:
        self.memory = memory
        self.slot_count, self.column_count = self._read(32, 4), self._read(36, 4)
        self.ring_at, self.slots_at, self.released_at, self.data_at = (
            self._read(at, 8) for at in (40, 48, 56, 64)
        )
        self.size = self._read(80, 8)
        self._slots = [self._read(self.ring_at + 4 * sequence, 4) for sequence in range(records)]
        self._bodies = [
            {name: self._read(self._slot(n) + at, width) for name, (at, width) in SLOT.items()}
            for n in range(records)
        ]
        self.index_end = max(
            (self._extent(n) + body["index_bytes"] for n, body in enumerate(self._bodies)),
            default=self.data_at,
        )

    def _read(self, at: int, width: int) -> int:
        return int.from_bytes(self.memory[at : at + width], "little")

    def _slot(self, record: int) -> int:
        return self.slots_at + self._slots[record] * SLOT_BYTES

    def _extent(self, record: int) -> int:
        return self.data_at + self._bodies[record]["extent_at"]

    def place(self, name: str) -> tuple[int, int]:
        """Offset and width of a named place. Numbers wrap, so that every name has a place."""
        what, *rest = name.split(".")
        numbers = [int(part) for part in rest if part.isdigit()]
        field = rest[-1]
        if what == "header":
            return HEADER[field]
        if what == "column":
            at, width = COLUMN[field]
            return PAGE + numbers[0] % self.column_count * COLUMN_BYTES + at, width
        if what == "ring":
            return self.ring_at + numbers[0] % self.slot_count * 4, 4
        if what == "released":
            return self.released_at + numbers[0] % self.slot_count * 8, 8
        if what == "byte":
            return numbers[0] % self.index_end, 1
        record = numbers[0] % len(self._slots)
        if what == "slot":
            at, width = SLOT[field]
            return self._slot(record) + at, width
        body = self._bodies[record]
        if what == "group_id":
            return self._extent(record) + body["columns"] * ENTRY_BYTES + numbers[1] % body[
                "group_id_bytes"
            ], 1
        entry = self._extent(record) + numbers[1] % body["columns"] * ENTRY_BYTES
        if what == "entry":
            at, width = ENTRY[field]
            return entry + at, width
        field, width = BEHIND[what]
        line = self._read(entry + ENTRY[field][0], 4)
        return self._extent(record) + line * LINE + numbers[2] * width, width

    def change(self, name: str, how: str, value: int) -> None:
        """`set` a place to a number, or `add` to it; both wrap at its width."""
        at, width = self.place(name)
        now = self._read(at, width) if how == "add" else 0
        self.memory[at : at + width] = ((now + value) % (1 << 8 * width)).to_bytes(width, "little")


def header_places() -> Iterator[str]:
    return (f"header.{field}" for field in HEADER)


def slot_places(record: int) -> Iterator[str]:
    return (f"slot.{record}.{field}" for field in SLOT)


def entry_places(record: int, entry: int) -> Iterator[str]:
    yield from (f"entry.{record}.{entry}.{field}" for field in ENTRY)
    yield from (f"{what}.{record}.{entry}.0" for what in BEHIND)


def copy_of(memory: Any) -> bytes:
    return bytes(memory)


def pack(fmt: str, *values: int) -> bytes:
    return struct.pack("<" + fmt, *values)
