"""The names of lanes as they are created, told by the kernel: so that none comes and goes unnoticed."""

import contextlib
import ctypes
import errno
import os
import struct

from shmbridge.config import check_bridge_name
from shmbridge.segments import MOUNT, control_name

_CREATED, _TOO_MANY = 0x100, 0x4000  # IN_CREATE, IN_Q_OVERFLOW
_HEAD = struct.Struct("iIII")  # struct inotify_event without its name
_READ_BYTES = 1 << 16


class Arrivals:
    """Notes each lane of a bridge from now on; costs its producers nothing but a note at their start.

    Where the kernel has no inotify, or no more of it for this user, it notes nothing: see `is_complete`.
    """

    def __init__(self, bridge: str) -> None:
        self._prefix = control_name(check_bridge_name(bridge))[1:].removesuffix("c") + "l."
        self.is_complete = False  # whether every lane since the beginning was noted
        self._fd = -1
        libc = ctypes.CDLL(None, use_errno=True)
        with contextlib.suppress(AttributeError):
            self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            watch = libc.inotify_add_watch(self._fd, os.fsencode(MOUNT), _CREATED)
            self.is_complete = self._fd >= 0 and watch >= 0

    def take(self) -> set[str]:
        """Returns the names of lanes that were created since the last call. Never blocks."""
        found: set[str] = set()
        while self._fd >= 0:
            try:
                events = os.read(self._fd, _READ_BYTES)
            except OSError as wrong:
                if wrong.errno not in (errno.EAGAIN, errno.EINTR):
                    self.is_complete = False
                break
            found |= self._lanes(events)
        return found

    def close(self) -> None:
        """Ends the notes. Never blocks."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _lanes(self, events: bytes) -> set[str]:
        found, at = set(), 0
        while at < len(events):
            _, mask, _, length = _HEAD.unpack_from(events, at)
            name = events[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
            at += _HEAD.size + length
            if mask & _TOO_MANY:
                self.is_complete = False
            elif (text := os.fsdecode(name)).startswith(self._prefix):
                found.add(f"/{text}")
        return found
