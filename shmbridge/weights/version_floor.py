"""The floor under the versions of a bridge's weights: the highest version of replaced segments, kept in the
control segment.

A death at any line leaves the segment, or the floor.
"""

import contextlib
import os

from shmbridge._ext import header
from shmbridge._ext import weights as versions
from shmbridge._ext.header import Control
from shmbridge._ext.weights import Versions
from shmbridge.errors import BadArgument, LayoutMismatch
from shmbridge.segments import (
    LockByte,
    lock_exclusive,
    map_segment,
    open_segment,
    require_room_for_weights,
    still_named,
    unlink_segment,
    unlock,
    weights_name,
)


def floor(control: Control, bridge: str) -> int | None:
    """Returns the highest version of the segments that were replaced; None if none was.

    Raises LayoutMismatch for a value that no writer can have left.
    """
    version = control.weights_floor
    if version >= versions.end:
        raise LayoutMismatch(
            f"the control segment of bridge {bridge!r} says that its weights had version {version}, none is "
            f"above {versions.end - 1}",
            hint="something overwrote it: end what uses the bridge and run: shmbridge clean <bridge> --yes",
        )
    return None if version < 0 else int(version)


def require_above(version: int, last: int | None) -> None:
    """Raises BadArgument unless the version is above the last one."""
    if last is not None and version <= last:
        raise BadArgument(
            f"weights version {version} is not after {last}: versions of one bridge only rise",
            hint=f"publish version {last + 1}, or use another bridge for a run from 0",
        )


def keep(control: Control, found: Versions, bridge: str) -> None:
    """Raises the floor to the newest version of the named segment; the caller holds its writer's lock.

    Raises LayoutMismatch as `floor`.

    The segment may be incomplete: its version is the one on which two words of the header agree, whatever
    happened to the others.
    """
    floor(control, bridge)
    if (latest := found.latest) is not None:
        control.raise_weights_floor(latest[0])


def remove_segment(control: Control, bridge: str, version: int, size: int) -> None:
    """Removes the weights segment, complete or not, to make room for one of `size` bytes that begins with
    `version`, if no writer lives; keeps its last version in the control segment.

    Readers that map it keep it until they check again. Raises ValueError if it has that version or a later
    one, ShmTooSmall if the mount has no room for the new one even without it, LayoutMismatch as `floor`: the
    segment then stays.
    """
    name = weights_name(bridge)
    with contextlib.suppress(FileNotFoundError):
        file = open_segment(name)
        try:
            if not (lock_exclusive(file.fd, LockByte.WRITER) and still_named(file.fd, name)):
                return
            # Not before: its writer may have reserved it, and published, since.
            if os.fstat(file.fd).st_size >= versions.header_bytes:
                mapping = map_segment(file, versions.header_bytes, f"segment {name}", readonly=True)
                keep(control, Versions(mapping), bridge)
            require_above(version, floor(control, bridge))
            require_room_for_weights(bridge, size, freed=os.fstat(file.fd).st_size)
            unlink_segment(file.fd, name)
            header.fault(b"weights.removed")
        finally:
            unlock(file.fd, LockByte.WRITER)  # the error's frames keep the mapping, and so the lock
            file.close()
