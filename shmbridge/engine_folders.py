"""Folders on the mount with weights for engines that load from a path. One has a lock of its writer; without it, any start removes it."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shmbridge._ext import mapping as mapping_module
from shmbridge.segment import MOUNT, engine_folder_prefix


class EngineFolder:
    """An empty folder of this process' own, named after the bridge; whoever sees its lock leaves it alone."""

    def __init__(self, bridge: str) -> None:
        """Blocks for nothing. Raises OSError: no room on the mount, or no descriptor left; there is no folder then."""
        self._fd = -1
        while self._fd < 0:
            self.path = MOUNT / f"{engine_folder_prefix(bridge)}{os.urandom(8).hex()}"
            self.path.mkdir(mode=0o700)
            try:
                self._fd = _lock(self.path)  # -1: somebody took it for a dead one's, and removes it
            except BaseException:
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                raise

    def remove(self) -> None:
        """Remove it with what is in it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            mapping_module.close_watched(fd)


def remove_dead(bridge: str, *, dry_run: bool = False) -> tuple[list[str], dict[str, str]]:
    """Removes the folders whose writers are dead, or only looks; the names of those, and of what is kept, with the reason. Never blocks."""
    dead: list[str] = []
    kept: dict[str, str] = {}
    for folder in _folders(bridge):
        name = f"/{folder.name}"
        try:
            fd = _lock(folder)
        except OSError as wrong:
            kept[name] = f"cannot be opened: {wrong.strerror}"
            continue
        if fd < 0 and folder.exists():
            kept[name] = "its writer is alive"
            continue
        dead.append(name)
        if fd >= 0:
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
            mapping_module.close_watched(fd)
    return dead, kept


def _folders(bridge: str) -> Iterator[Path]:
    for folder in sorted(MOUNT.glob(f"{engine_folder_prefix(bridge)}*")):
        with contextlib.suppress(OSError):
            if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid():
                yield folder


def _lock(folder: Path) -> int:
    """A descriptor with the folder's lock; -1 if somebody has it, or the folder is gone. Raises OSError: no descriptor left, say."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    locked = False
    try:
        mapping_module.watch(fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = os.path.samestat(os.fstat(fd), folder.lstat())
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not locked:
            mapping_module.close_watched(fd)
    return fd if locked else -1
