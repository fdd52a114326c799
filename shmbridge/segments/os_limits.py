"""The resources this process may still take: memory of its cgroups and of the machine, descriptors, address
space, file size. And the one translation of an OSError into an error of ours.

Reads the kernel's limits and names the one that was hit.
"""

import contextlib
import errno
import io
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

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
            f"no address space is left for {what}: RLIMIT_AS is {_size(soft)}",
            hint="ulimit -v unlimited, or lower lane_bytes",
        )
    if wrong.errno == errno.EFBIG:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return ProcessLimit(
            f"a file may not be large enough for {what}: RLIMIT_FSIZE is {_size(soft)}",
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


def _size(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
