"""Names and memory of segments: naming, creating, reserving, placing, opening and unlinking them.

Memory is in huge pages if the kernel gives them, and locked if asked; both at best effort. membership.py
decides who takes part in a bridge and which segments are dead.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import posix_ipc

from shmbridge._ext import header
from shmbridge._ext import header as mapping_module
from shmbridge._ext.header import Descriptor, Mapping, fill_with_huge_pages
from shmbridge.config import check_bridge_name, format_size
from shmbridge.errors import LayoutMismatch, ShmPermission, ShmTooSmall, ShmUnavailable
from shmbridge.segments import locks
from shmbridge.segments.locks import LockByte

HUGE_PAGE = 2 << 20
# Most time for one huge page: a page that takes longer was made by moving other memory.
_MOST_NS = 20_000_000
_KEPT_S = 10.0
_FIELDS = {"Size": "mapped", "Rss": "resident", "ShmemPmdMapped": "huge", "Locked": "locked"}


def huge_pages_wanted() -> bool:
    """Returns whether segments may lie in huge pages: not with SHMBRIDGE_HUGE_PAGES=never."""
    return os.environ.get("SHMBRIDGE_HUGE_PAGES", "") != "never"


def fill_huge_pages(fd: int, at: int, size: int) -> bool:
    """Puts these bytes of a segment in huge pages; returns whether every whole one succeeded, so that the
    caller may try the next bytes.

    Blocks.
    """
    whole = size // HUGE_PAGE * HUGE_PAGE
    return whole > 0 and fill_with_huge_pages(fd, at, size, _MOST_NS) == whole


def settle_mapping(mapping: Mapping, huge: bool) -> None:
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
            self._found = memory_of(mappings)
            self._looked_at = time.monotonic()
        return {f"lane_{name}_bytes": count for name, count in self._found.items()}


def memory_of(mappings: Iterable[Mapping]) -> dict[str, int]:
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


log = logging.getLogger(__name__)

MOUNT = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PREFIX = "shmbridge."
_MODE = 0o600
_STEP_BYTES = 16 << 20
_LEFT_ALONE_BYTES = 8 << 20
_TURN_PREFIX = ".shmbridge-turn."
_TURN_TIMEOUT_S = 10.0
_LESS_WEIGHTS = "publish smaller types"
_SEGMENT_NAME = re.compile(r"shmbridge\.([A-Za-z0-9_-]{1,48})\.(c|w|s|g|[levr]\.[0-9a-f]{16})")


def control_name(bridge: str) -> str:
    """Name of the bridge's control segment."""
    return f"/{_PREFIX}{check_bridge_name(bridge)}.c"


def weights_name(bridge: str) -> str:
    """Name of the bridge's weights segment."""
    return f"/{_PREFIX}{check_bridge_name(bridge)}.w"


def socket_directory(bridge: str) -> Path:
    """Owner-only directory of the bridge's control socket, on the same mount."""
    return MOUNT / f"{_PREFIX}{check_bridge_name(bridge)}.s"


def gateway_directory(bridge: str) -> Path:
    """Owner-only directory of the state that an HTTP gateway of the bridge keeps over restarts, on the same
    mount.
    """
    return MOUNT / f"{_PREFIX}{check_bridge_name(bridge)}.g"


def engine_folder_prefix(bridge: str) -> str:
    """Prefix of the names of folders with weights for engines, on the same mount."""
    return f"{_PREFIX}{check_bridge_name(bridge)}.e."


def lane_names(bridge: str) -> list[str]:
    """Returns the names of all lanes of the bridge that exist now, sorted."""
    return _names(bridge, "l")


def is_lane_of(name: str, bridge: str) -> bool:
    """Returns whether a segment's name is that of a lane of the bridge."""
    return name.startswith(f"/{_PREFIX}{bridge}.l.")


def value_names(bridge: str) -> list[str]:
    """Returns the names of all segments of values of the bridge that exist now, sorted."""
    return _names(bridge, "v")


def receipt_names(bridge: str) -> list[str]:
    """Returns the names of all receipts of the bridge that exist now, sorted."""
    return _names(bridge, "r")


def new_name(bridge: str, kind: str) -> str:
    """Returns a name that was never used: "l" a lane's, "v" that of a segment of values."""
    return f"/{_PREFIX}{check_bridge_name(bridge)}.{kind}.{secrets.token_hex(8)}"


def _names(bridge: str, kind: str) -> list[str]:
    prefix = f"{_PREFIX}{check_bridge_name(bridge)}.{kind}."
    return sorted(
        f"/{entry.name}"
        for entry in _mount()
        if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False)
    )


def mount_id() -> str:
    """Returns an id of this mount that differs from those of other machines and containers while it is
    mounted; "" if it cannot be told.
    """
    with contextlib.suppress(OSError):
        return f"{_BOOT_ID.read_text().strip()}:{MOUNT.stat().st_dev}"
    return ""


def bridge_names() -> list[str]:
    """Returns the names of all bridges of which this user has anything on the mount, sorted."""
    found = ((_SEGMENT_NAME.fullmatch(entry.name), entry) for entry in _mount())
    fit = (
        (match, entry)
        for match, entry in found
        if match and entry.is_dir(follow_symlinks=False) == (match[2][0] in "sge")
    )
    ours = {match[1] for match, entry in fit if _is_ours(entry)}
    return sorted(ours)


def _is_ours(entry: "os.DirEntry[str]") -> bool:
    with contextlib.suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False


def _mount() -> list["os.DirEntry[str]"]:
    """Returns the entries of the mount; any user may put anything there."""
    with contextlib.suppress(FileNotFoundError), os.scandir(MOUNT) as entries:
        return list(entries)
    return []


def open_segment(name: str, flags: int = 0) -> Descriptor:
    """Opens a named segment; the descriptor is not inherited by exec nor by fork.

    FileNotFoundError, FileExistsError, ShmPermission.
    """
    while True:
        forks = mapping_module.forks()
        file = _open_once(name, flags)
        if mapping_module.forks() == forks:
            return file
        # A child forked in between may hold this open file, and with it any lock we take on it: do not use
        # this one.
        if flags & posix_ipc.O_EXCL:
            unlink_segment(file.fd, name)
        file.close()


def _open_once(name: str, flags: int) -> Descriptor:
    try:
        opened = posix_ipc.SharedMemory(name, flags, mode=_MODE, size=0)
    except posix_ipc.ExistentialError as missing:
        if flags & posix_ipc.O_EXCL:
            raise FileExistsError(name) from missing
        if flags & posix_ipc.O_CREAT:
            hint = "mount a tmpfs at /dev/shm, or share the host's: docker run --ipc=host"
            raise ShmUnavailable(f"{MOUNT} is not there", hint=hint) from missing
        raise FileNotFoundError(name) from missing
    except posix_ipc.PermissionsError as denied:
        raise _denied(name) from denied
    except (ValueError, OSError) as wrong:
        raise _cannot_open(name, wrong) from wrong
    file = Descriptor(opened.fd)
    found = os.fstat(file.fd)
    if found.st_uid == os.geteuid():
        if flags & posix_ipc.O_CREAT and found.st_mode & 0o777 != _MODE:
            os.fchmod(file.fd, _MODE)  # the umask took a bit away, without which nobody else could open it
        return file
    file.close()  # root may open everything, and its new segments would lock the owner out
    raise _foreign(name, found.st_uid)


def _cannot_open(name: str, wrong: ValueError | OSError) -> Exception:
    if stands_there(name) == "other":
        return LayoutMismatch(
            f"{MOUNT}{name} is a directory, a link or the like, no segment", hint="remove it"
        )
    if isinstance(wrong, ValueError):
        return wrong
    if wrong.errno == errno.EROFS:
        return ShmUnavailable(
            f"{MOUNT} is mounted read-only", hint="mount it read-write: docker run -v /dev/shm:/dev/shm:rw"
        )
    if wrong.errno == errno.ENOSPC:
        return _mount_too_small(0, f"segment {name}")
    return locks.as_error(wrong, "shm_open", f"segment {name}")


def _denied(name: str) -> ShmPermission | ShmUnavailable:
    try:
        found = os.stat(MOUNT / name[1:])
        if found.st_uid != os.geteuid():
            return _foreign(name, found.st_uid)
        return ShmUnavailable(
            f"segment {name} has mode {found.st_mode & 0o7777:04o}: even its owner may not open it",
            hint=f"chmod 600 {MOUNT}{name}",
        )
    except OSError:  # no such segment: this user may not write to the mount
        mode = os.stat(MOUNT).st_mode & 0o7777
        return ShmUnavailable(
            f"{MOUNT} has mode {mode:04o}: uid {os.geteuid()} may not create there",
            hint="chmod 1777 /dev/shm",
        )


def _foreign(name: str, owner: int) -> ShmPermission:
    return ShmPermission(
        f"segment {name} belongs to uid {owner}, this process is uid {os.geteuid()}",
        hint="run producers and consumer as the same user, or choose another bridge name",
    )


def stands_there(name: str) -> str:
    """Returns what the name leads to: "segment", "other" (a directory, a link), or "" for nothing."""
    try:
        mode = os.lstat(MOUNT / name[1:]).st_mode
    except FileNotFoundError:
        return ""
    return "segment" if stat.S_ISREG(mode) else "other"


def foreign_owner(name: str) -> str:
    """Returns the owner of the name, in words, if it is another user's; "" if it is ours, or does not exist.

    Root could remove it anyway.
    """
    try:
        owner = os.lstat(MOUNT / name[1:]).st_uid
    except FileNotFoundError:
        return ""
    return "" if owner == os.geteuid() else f"belongs to uid {owner}"


def still_named(fd: int, name: str) -> bool:
    """Returns whether the name still leads to this open segment."""
    try:
        named = os.stat(MOUNT / name[1:])
    except FileNotFoundError:
        return False
    try:
        mine = os.fstat(fd)
    except OSError as wrong:
        raise locks.as_error(wrong, "fstat", f"segment {name}") from wrong
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def unlink_segment(fd: int, name: str) -> bool:
    """Removes the name if it still leads to `fd`; the caller holds the segment's lock.

    Returns False if it was gone already.
    """
    if not still_named(fd, name):
        return False
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
        return True
    return False


def remove_folder(path: Path) -> None:
    """Removes a folder and its contents, as far as possible; follows no link.

    Does not use shutil.rmtree: when a signal handler's exception interrupts it, it closes a descriptor twice.
    """
    with contextlib.suppress(OSError):
        if path.is_symlink():
            return
        for each in map(path.joinpath, os.listdir(path)):
            with contextlib.suppress(OSError):
                if each.is_dir() and not each.is_symlink():
                    remove_folder(each)
                else:
                    each.unlink()
        path.rmdir()


def reserve(fd: int, size: int, what: str, *, less: str = "lower lane_bytes") -> bool:
    """Reserves every page of a segment now, so that too little memory is an error here and never a SIGBUS
    later; returns whether in huge pages.

    One process of the mount at a time, and it checks the memory that is left before each step: the kernel
    kills a process when two find the last of it free. Raises ShmTooSmall, ProcessLimit.
    """
    with _one_at_a_time():
        return _reserve(fd, size, what, less)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Holds a lock on this user's own file; the lock ends with its holder.

    A process that stopped inside is waited for 10 s, not for ever.
    """
    how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        turn = Descriptor(os.open(MOUNT / f"{_TURN_PREFIX}{os.geteuid()}", how, 0o600))
    except OSError:  # no room for another file, or another user has put something there
        yield
        return
    deadline = time.monotonic() + _TURN_TIMEOUT_S
    try:
        # Another user could hold a lock on his own file for ever.
        while os.fstat(turn.fd).st_uid == os.geteuid() and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(turn.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.002)
        yield
    finally:
        turn.close()


def _reserve(fd: int, size: int, what: str, less: str) -> bool:
    huge = size >= HUGE_PAGE and huge_pages_wanted()
    _require_room(size, what, less)
    for at in range(0, size, _STEP_BYTES):
        room, whose = locks.memory_headroom()
        if size - at + min(size, _LEFT_ALONE_BYTES) > room:
            raise ShmTooSmall(
                f"{what} needs {format_size(size - at)}{' more' if at else ''}, {whose} has "
                f"{format_size(room)} left ({format_size(_LEFT_ALONE_BYTES)} of it for the processes "
                "themselves)",
                hint="give the container more memory (segments count as memory of who creates them), or "
                f"{less}",
            )
        step = min(_STEP_BYTES, size - at)
        huge = huge and (step < HUGE_PAGE or fill_huge_pages(fd, at, step))
        try:
            os.posix_fallocate(fd, at, step)
        except OSError as full:
            if full.errno == errno.ENOSPC:
                raise _mount_too_small(size, what, less) from full
            if full.errno == errno.ENOMEM:
                raise ShmTooSmall(
                    f"{what} needs {format_size(size)}: the kernel has no memory left for it", hint=less
                ) from full
            raise locks.as_error(full, "fallocate", what) from full
    return huge


def _require_room(size: int, what: str, less: str, freed: int = 0) -> None:
    mount = os.statvfs(MOUNT)
    if mount.f_blocks and size > mount.f_bavail * mount.f_frsize + freed:
        raise _mount_too_small(size, what, less)


def _mount_too_small(size: int, what: str, less: str = "lower lane_bytes") -> ShmTooSmall:
    mount = os.statvfs(MOUNT)
    if mount.f_files and not mount.f_favail:
        return ShmTooSmall(
            f"{what}: {MOUNT} has no inode left of {mount.f_files}",
            hint="remove what is dead: shmbridge clean",
        )
    return ShmTooSmall(
        f"{what} needs {format_size(size)}, {MOUNT} has {format_size(mount.f_bavail * mount.f_frsize)} free "
        f"of {format_size(mount.f_blocks * mount.f_frsize)}",
        hint=f"docker run --shm-size=16g (Kubernetes: emptyDir with medium Memory), or {less}",
    )


def map_segment(file: Descriptor, size: int, what: str, *, readonly: bool = False) -> Mapping:
    """Maps a segment whole; the mapping keeps `file` open. Raises ProcessLimit."""
    try:
        return Mapping(file, size, readonly)
    except OSError as wrong:
        raise locks.as_error(wrong, "mmap", f"{what} ({format_size(size)})") from wrong


def map_data_writable(lane: Mapping, name: str) -> None:
    """Makes a reader's mapping of a lane writable, for a GPU that cannot register read-only memory; logged,
    and shown by inspect.

    Idempotent.
    """
    if not lane.data_writable:
        lane.make_writable()
        locks.lock_shared(lane.fd, LockByte.WRITABLE_DATA)
        log.warning("lane %s is mapped writable here: this GPU registers no read-only memory", name)


def create_lane(bridge: str, size: int) -> tuple[str, Mapping]:
    """Returns a new, locked, reserved, empty lane segment.

    The caller formats it; until then its lock shows it as alive to all but its locker.
    """
    while True:
        name = new_name(bridge, "l")
        try:
            file = open_segment(name, posix_ipc.O_CREX)
        except FileExistsError:
            continue
        header.fault(b"segment.created")
        try:
            # A sweeper may take an unlocked, empty segment for that of a dead creator; then it is no longer
            # ours.
            if not (locks.lock_exclusive(file.fd, LockByte.PRODUCER) and still_named(file.fd, name)):
                file.close()
                continue
            header.fault(b"segment.locked")
            huge = reserve(file.fd, size, f"a lane of bridge {bridge!r}")
            header.fault(b"segment.reserved")
            mapping = map_segment(file, size, f"a lane of bridge {bridge!r}")
            settle_mapping(mapping, huge)
            return name, mapping
        except BaseException:
            unlink_segment(file.fd, name)
            file.close()
            raise


def require_room_for_weights(bridge: str, size: int, *, freed: int) -> None:
    """Raises ShmTooSmall if the mount has no room for a weights segment even after another one, of `freed`
    bytes, is removed.

    Reserves nothing.
    """
    _require_room(size, f"the weights segment of bridge {bridge!r}", _LESS_WEIGHTS, freed)


def create_weights(bridge: str, size: int) -> Mapping | None:
    """Returns a new, writer-locked, reserved, empty weights segment; None if the name is taken."""
    name = weights_name(bridge)
    try:
        file = open_segment(name, posix_ipc.O_CREX)
    except FileExistsError:
        return None
    header.fault(b"weights.created")
    try:
        if not (locks.lock_exclusive(file.fd, LockByte.WRITER) and still_named(file.fd, name)):
            file.close()
            return None
        huge = reserve(file.fd, size, f"the weights segment of bridge {bridge!r}", less=_LESS_WEIGHTS)
        mapping = map_segment(file, size, f"the weights segment of bridge {bridge!r}")
        settle_mapping(mapping, huge)
        return mapping
    except BaseException:
        unlink_segment(file.fd, name)
        file.close()
        raise


def open_mapping(name: str, *, readonly: bool = False, minimum: int = 1) -> Mapping | None:
    """Maps an existing segment as `map_now`; None too if it is gone, or is not a segment."""
    try:
        file = open_segment(name)
    except (FileNotFoundError, LayoutMismatch):
        return None
    try:
        return map_now(file, name, readonly=readonly, minimum=minimum)
    except BaseException:
        file.close()  # the error's frames keep `file`
        raise


def map_now(file: Descriptor, name: str, *, readonly: bool = False, minimum: int = 1) -> Mapping | None:
    """Maps an open segment as large as it is now; None if that is less than `minimum`.

    While its creator reserves it, that is not the whole segment: header.read_lane and Versions.ready say
    that such a mapping is not ready. It is the whole one for a caller who holds the creator's lock, or has
    seen the magic before. Raises ProcessLimit.
    """
    size = os.fstat(file.fd).st_size
    return map_segment(file, size, f"segment {name}", readonly=readonly) if size >= minimum else None
