"""Liveness locks: byte locks on a segment's open file description, which the kernel drops when the holder
dies.

A lock proves life; a pidfd only reports a death sooner.
"""

import contextlib
import errno
import fcntl
import os
import select
import struct
import time
from collections.abc import Callable
from enum import IntEnum

from shmbridge._ext.header import Descriptor
from shmbridge.segments import os_limits

_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid

_LETTING_GO_S = 1.0
_BRIEFLY_S = 0.05
_LOOK_AGAIN_S = 0.0005
MOST_RANKS = 1024
MOST_TICKETS = 1 << 16


class LockByte(IntEnum):
    """The meaning of each byte of a segment; the table of docs/adr/0001-lanes.md."""

    HUB = 0
    PARTICIPANTS = 1
    INITIALISING = 2
    VALUES = 3
    RELAY = 4
    FIRST_RANK = 1024
    FIRST_EPOCH = 1 << 32
    PRODUCER = 0
    READER = 1
    WRITABLE_DATA = 2
    FIRST_TICKET = 1 << 20
    WRITER = 0
    PARTS = 1
    FIRST_SLOT = 16


def _lock(fd: int, kind: int, byte: int, count: int = 1) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0))
    except OSError as wrong:
        if wrong.errno in (errno.EAGAIN, errno.EACCES):  # another holder has it
            return False
        raise os_limits.as_error(wrong, "fcntl(F_OFD_SETLK)", "a segment's lock") from wrong
    return True


def _holder(fd: int, byte: int, count: int) -> tuple[int, int, int]:
    """Returns kind, start and length of a lock that another open file has on any of the bytes."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, count, 0)
    try:
        kind, _, start, length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    except OSError as wrong:
        raise os_limits.as_error(wrong, "fcntl(F_OFD_GETLK)", "a segment's lock") from wrong
    return kind, start, length


def lock_exclusive(fd: int, byte: int) -> bool:
    """Takes the byte alone; False if another holder has it, also this process through another descriptor.

    Never blocks.
    """
    return _lock(fd, fcntl.F_WRLCK, byte)


def lock_after(holder: Callable[[], int], fd: int, byte: int) -> bool:
    """As lock_exclusive, but retries for up to a second if the named holder has ended, for 50 ms if none is
    named (0).

    Blocks during the retries.

    A monitor (ps, top) that reads the memory maps of a process keeps its mappings until it is done, and so
    the locks of a dead process.
    """
    began = time.monotonic()
    while not lock_exclusive(fd, byte):
        pid = holder()
        if not _has_ended(pid) or time.monotonic() - began > (_LETTING_GO_S if pid else _BRIEFLY_S):
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def _has_ended(pid: int) -> bool:
    """Returns whether no such process runs; 0 names no process."""
    if pid == 0:
        return True
    try:
        process = Descriptor(os.pidfd_open(pid), kept_from_children=False)
    except OverflowError:  # a segment may hold any number
        return True
    except OSError as wrong:
        return wrong.errno == errno.ESRCH
    poll = select.poll()
    poll.register(process.fd, select.POLLIN)
    return bool(poll.poll(0))


def lock_shared(fd: int, byte: int) -> bool:
    """Takes the byte together with other sharers; False if another holder has it alone. Never blocks."""
    return _lock(fd, fcntl.F_RDLCK, byte)


def unlock(fd: int, byte: int) -> None:
    """Frees the byte; does nothing if it was not held."""
    _lock(fd, fcntl.F_UNLCK, byte)


def unlock_all(fd: int) -> None:
    """Frees every byte."""
    _lock(fd, fcntl.F_UNLCK, 0, 0)


def is_locked(fd: int, byte: int, count: int = 1) -> bool:
    """Returns whether another open file description holds any of `count` bytes in any way.

    Never blocks, takes no lock.
    """
    return _holder(fd, byte, count)[0] != fcntl.F_UNLCK


def show_tickets(lane_fd: int, count: int) -> None:
    """Locks exactly the first `count` ticket bytes, whatever was locked before. Never blocks."""
    if count:
        _lock(lane_fd, fcntl.F_WRLCK, LockByte.FIRST_TICKET, count)
    if count < MOST_TICKETS:
        _lock(lane_fd, fcntl.F_UNLCK, LockByte.FIRST_TICKET + count, MOST_TICKETS - count)


def tickets_held(lane_fd: int) -> int:
    """Returns how many tickets the producer of a lane holds: locks on as many bytes in a row, which the
    kernel reports as one.

    Never blocks.

    At most MOST_TICKETS, whatever bytes are locked.
    """
    kind, start, count = _holder(lane_fd, LockByte.FIRST_TICKET, MOST_TICKETS)
    if kind == fcntl.F_UNLCK:
        return 0
    # Length 0: the lock reaches to the end of the file.
    return min(start + count - LockByte.FIRST_TICKET, MOST_TICKETS) if count else MOST_TICKETS


def pid_namespace() -> int:
    """Returns the inode of this process' pid namespace: pids of another one mean nothing here.

    0 where /proc is not mounted: then every process counts as one of another namespace.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def is_own_namespace(namespace: int) -> bool:
    """Returns whether a pid of that namespace means the same process here."""
    return namespace != 0 and namespace == pid_namespace()


def open_pidfd(pid: int, namespace: int) -> int:
    """Returns a descriptor that becomes readable when the process ends; -1 if none can be had."""
    if not is_own_namespace(namespace):
        return -1
    with contextlib.suppress(OSError, OverflowError):  # a lane may hold any number
        return os.pidfd_open(pid)
    return -1
