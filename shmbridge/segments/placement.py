"""Placement of segment memory: in huge pages if the kernel gives them, locked if asked. Best effort."""

import contextlib
import os
import time
from collections.abc import Iterable

from shmbridge._ext.header import Mapping, fill_with_huge_pages

HUGE_PAGE = 2 << 20
# Most time for one huge page: a page that takes longer was made by moving other memory.
_MOST_NS = 20_000_000
_KEPT_S = 10.0
_FIELDS = {"Size": "mapped", "Rss": "resident", "ShmemPmdMapped": "huge", "Locked": "locked"}


def huge_pages_wanted() -> bool:
    """Returns whether segments may lie in huge pages: not with SHMBRIDGE_HUGE_PAGES=never."""
    return os.environ.get("SHMBRIDGE_HUGE_PAGES", "") != "never"


def fill(fd: int, at: int, size: int) -> bool:
    """Puts these bytes of a segment in huge pages; returns whether every whole one succeeded, so that the
    caller may try the next bytes.

    Blocks.
    """
    whole = size // HUGE_PAGE * HUGE_PAGE
    return whole > 0 and fill_with_huge_pages(fd, at, size, _MOST_NS) == whole


def settle(mapping: Mapping, huge: bool) -> None:
    """Prepares a new mapping for its first use.

    With huge pages, every page is mapped now, which is cheap; small pages are mapped as they are touched,
    which costs the same and only for used pages. SHMBRIDGE_LOCK_MEMORY=1 locks them.
    """
    if huge:
        mapping.populate()
    if os.environ.get("SHMBRIDGE_LOCK_MEMORY", "") == "1":
        mapping.lock()


class MemoryUse:
    """How some mappings of this process lie in memory, read at most every ten seconds: the kernel takes
    milliseconds to answer.
    """

    def __init__(self) -> None:
        self._looked_at = -_KEPT_S
        self._found: dict[str, int] = {}

    def of(self, mappings: Iterable[Mapping]) -> dict[str, int]:
        """Returns `lane_mapped_bytes`, and of them `lane_resident_bytes`: touched by this process,
        `lane_huge_bytes`: seen by it in huge pages, and `lane_locked_bytes`.

        Any thread.
        """
        if time.monotonic() - self._looked_at >= _KEPT_S:
            self._found = memory(mappings)
            self._looked_at = time.monotonic()
        return {f"lane_{name}_bytes": count for name, count in self._found.items()}


def memory(mappings: Iterable[Mapping]) -> dict[str, int]:
    """Returns bytes of these mappings: `mapped`, `resident`, `huge`, `locked`. Reads all of
    /proc/self/smaps.
    """
    found = dict.fromkeys(_FIELDS.values(), 0)
    places = [range(mapping.address, mapping.address + mapping.size) for mapping in mappings]
    ours = False
    with contextlib.suppress(OSError), open("/proc/self/smaps") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if " " in name:  # the head of a mapping: addresses, rights, offset, device, inode, path
                start = int(name.partition("-")[0], 16)
                ours = any(start in place for place in places)  # one mapping may appear in parts
            elif ours and name in _FIELDS:
                found[_FIELDS[name]] += 1024 * int(rest.split()[0])
    return found
