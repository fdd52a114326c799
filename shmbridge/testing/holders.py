"""The segments of a bridge on the mount, and the processes that still have them open or mapped: for the error
of a test that leaves some.

Reads names and /proc only. Used by the fixtures.
"""

import contextlib
import os
from pathlib import Path

from shmbridge.segments import MOUNT


def segments_of(bridge: str) -> list[str]:
    """Returns the names of the bridge's segments, and of its socket directory, that exist now, sorted."""
    return sorted(name for name in os.listdir(MOUNT) if name.startswith(f"shmbridge.{bridge}."))


def holders(bridge: str) -> list[str]:
    """Returns one line for each process that maps a segment of the bridge: its pid, its command and the
    segments.

    Sees processes of this user in this pid namespace only.
    """
    prefix = f"{MOUNT}/shmbridge.{bridge}."
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (mapped := _mapped(entry, prefix)):
            found.append(f"pid {entry.name} ({_command(entry)}) maps {', '.join(mapped)}")
    return sorted(found)


def _mapped(process: Path, prefix: str) -> list[str]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        paths = [
            line.split(maxsplit=5)[-1]
            for line in (process / "maps").read_text().splitlines()
            if prefix in line
        ]
        return sorted({path.removeprefix(f"{MOUNT}/").removesuffix(" (deleted)") for path in paths})
    return []


def _command(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:60]
    return "?"
