"""The kernel's locks and limits: byte locks that prove life, and what this process may still take.

A liveness lock is on a segment's open file description, and the kernel drops it when the holder dies: it
proves life; a pidfd only reports a death sooner. Limits: memory of the cgroups and of the machine,
descriptors, address space, file size; and the one translation of an OSError into an error of ours.
"""

import contextlib
import errno
import fcntl
import io
import os
import resource
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path

from shmbridge._ext.header import Descriptor
from shmbridge.config import format_size
from shmbridge.errors import Closed, ProcessLimit, ShmBridgeError, ShmUnavailable

_NO_LIMIT = 1 << 60  # cgroup v1 writes "none" as the largest page-aligned number
_ENOUGH_DESCRIPTORS = 1 << 16
_MOST_LANES = 1024
_LEFT_FOR_OTHERS = 128  # descriptors for the control plane, a model's files, a log
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def memory_headroom(root: Path = Path("/")) -> tuple[int, str]:
    """Returns the bytes that can still be taken before the kernel kills a process for it, and whose limit
    that is.

    Reclaimable page cache counts as free. `root` is where /proc and /sys are.
    """
    return min([*_cgroups(root), *_machine(root)], default=(_NO_LIMIT, "nobody"))


def _machine(root: Path) -> Iterator[tuple[int, str]]:
    try:
        found = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        yield 1024 * sum(int(found[key].split()[0]) for key in ("MemAvailable", "SwapFree")), "the machine"
    except (OSError, KeyError, ValueError):
        return


def _cgroups(root: Path) -> Iterator[tuple[int, str]]:
    for folder, limit_file, used_file, droppable in _cgroup_folders(root):
        try:
            limit, used = (folder / limit_file).read_text().strip(), int((folder / used_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max" and int(limit) < _NO_LIMIT:
            yield (
                max(int(limit) - used + int(stat.get(droppable, 0)), 0),
                f"the memory cgroup ({format_size(int(limit))})",
            )


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yields this process' memory cgroup and all above it, of version 2 and 1; in a container the path may be
    the host's, and not exist.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = Path(path.lstrip("/"))
        if controllers == "":
            for each in (below, *below.parents):
                yield root / "sys/fs/cgroup" / each, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            for each in (below, *below.parents):
                yield (
                    root / "sys/fs/cgroup/memory" / each,
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                )


def check_descriptors(count: int, what: str) -> None:
    """Raises ProcessLimit unless `count` more descriptors can be had now: some libraries abort the process
    when none is left.
    """
    with contextlib.ExitStack() as opened:
        try:
            # Objects close what they opened even after an interrupt; a number on its way to os.close stays.
            for _ in range(count):
                opened.enter_context(io.FileIO(os.devnull))
        except OSError as wrong:
            if limit := as_process_limit(wrong, f"{what} (it needs {count} descriptors)"):
                raise limit from wrong


def raise_descriptors() -> None:
    """Raises the soft limit of descriptors to the hard one, 65,536 at most: a process with many peers needs
    more than the usual soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors_at_most()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptors_at_most() -> int:
    """Returns the limit of descriptors that raise_descriptors() leads to; changes nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_DESCRIPTORS)
    return wanted if soft == resource.RLIM_INFINITY else max(soft, wanted)


def lanes_at_most() -> int:
    """Returns how many lanes a process can map beside its open files, at two descriptors each; at most 1,024.

    Raises the soft limit first.
    """
    raise_descriptors()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_LANES
    return lanes_within(soft)


def lanes_within(descriptors: int) -> int:
    """Returns how many lanes fit in so many descriptors, beside this process' open files; at most 1,024."""
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:
        taken = 64
    return max(1, min(_MOST_LANES, (descriptors - taken - _LEFT_FOR_OTHERS) // 2))


def check_threads(count: int, what: str) -> None:
    """Raises ProcessLimit unless `count` more threads can be started now: some libraries abort the process
    when none can.
    """
    end, started = threading.Event(), []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as wrong:
        raise ProcessLimit(
            f"no {count} threads can be started for {what}: {wrong} ({threading.active_count()} Python "
            "threads run)",
            hint="raise the container's pids limit, ulimit -u or ulimit -v",
        ) from wrong
    finally:
        end.set()
        for thread in started:
            thread.join()


def as_process_limit(wrong: OSError, what: str) -> ProcessLimit | None:
    """Returns the limit of this process behind an OSError, with its number; None for an OSError about
    something else.
    """
    # posix_ipc gives a text without errno.
    if wrong.errno in _TOO_MANY_FILES or "maximum number of files" in str(wrong):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return ProcessLimit(
            f"no descriptor is left for {what}: RLIMIT_NOFILE is {soft}, at most {_number(hard)}",
            hint=f"ulimit -n {max(1024, 4 * soft)}, or close what is not needed",
        )
    if wrong.errno == errno.ENOMEM:
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        return ProcessLimit(
            f"no address space is left for {what}: RLIMIT_AS is {_size_or_unlimited(soft)}",
            hint="ulimit -v unlimited, or lower lane_bytes",
        )
    if wrong.errno == errno.EFBIG:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return ProcessLimit(
            f"a file may not be large enough for {what}: RLIMIT_FSIZE is {_size_or_unlimited(soft)}",
            hint="ulimit -f unlimited, or lower lane_bytes",
        )
    return None


def as_error(wrong: OSError, call: str, what: str) -> ShmBridgeError:
    """Returns the error of ours for what the kernel answered to `call`, made for `what`.

    ProcessLimit for a limit of this process, Closed for a descriptor that was closed under it, ShmUnavailable
    with the call and the errno for anything else.
    """
    if limit := as_process_limit(wrong, what):
        return limit
    if wrong.errno == errno.EBADF:
        return Closed(
            f"the descriptor of {what} was closed by something else in this process",
            hint="open producers and consumers after what closes all descriptors (a daemon's start)",
        )
    name = errno.errorcode.get(wrong.errno or 0, str(wrong.errno))
    return ShmUnavailable(
        f"{what}: the system refused {call}: {name}, {os.strerror(wrong.errno or 0)}",
        hint="a sandbox or a seccomp filter may not know this call: allow it, or run outside to compare",
    )


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _size_or_unlimited(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)


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
        raise as_error(wrong, "fcntl(F_OFD_SETLK)", "a segment's lock") from wrong
    return True


def _holder(fd: int, byte: int, count: int) -> tuple[int, int, int]:
    """Returns kind, start and length of a lock that another open file has on any of the bytes."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, count, 0)
    try:
        kind, _, start, length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    except OSError as wrong:
        raise as_error(wrong, "fcntl(F_OFD_GETLK)", "a segment's lock") from wrong
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
