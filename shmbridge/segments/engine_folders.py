"""Folders on the mount with weights for engines that load from a path.

The writer locks its folder; a folder without a lock is removed by any later start.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from shmbridge._ext.header import Descriptor
from shmbridge.segments.segment import MOUNT, engine_folder_prefix, remove_folder


class EngineFolder:
    """A new empty folder of this process, named after the bridge; its lock keeps others from removing it."""

    def __init__(self, bridge: str) -> None:
        """Does not block.

        Raises OSError: no room on the mount, or no descriptor left; then there is no folder.
        """
        self._file: Descriptor | None = None
        while self._file is None:
            self.path = MOUNT / f"{engine_folder_prefix(bridge)}{os.urandom(8).hex()}"
            self.path.mkdir(mode=0o700)
            try:
                with contextlib.suppress(FileNotFoundError):
                    self.path.chmod(0o700)  # whatever the umask takes away
                # None: another process took it for a dead one's, and removes it
                self._file = _lock(self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                raise

    def remove(self) -> None:
        """Removes the folder and its contents. Idempotent."""
        if self._file is not None:
            remove_folder(self.path)
            self._file.close()
            self._file = None


def remove_dead(bridge: str, *, dry_run: bool = False) -> tuple[list[str], dict[str, str]]:
    """Removes the folders whose writers are dead (with `dry_run` only finds them); returns their names, and
    the kept folders, each with the reason.

    Never blocks.
    """
    dead: list[str] = []
    kept: dict[str, str] = {}
    for folder in _folders(bridge):
        name = f"/{folder.name}"
        try:
            file = _lock(folder)
        except OSError as wrong:
            kept[name] = f"cannot be opened: {wrong.strerror}"
            continue
        if file is None and folder.exists():
            kept[name] = "its writer is alive"
            continue
        dead.append(name)
        if file is not None:
            if not dry_run:
                remove_folder(folder)
            file.close()
    return dead, kept


def _folders(bridge: str) -> Iterator[Path]:
    for folder in sorted(MOUNT.glob(f"{engine_folder_prefix(bridge)}*")):
        with contextlib.suppress(OSError):
            if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid():
                yield folder


def _lock(folder: Path) -> Descriptor | None:
    """Opens and locks the folder; None if another process holds the lock, or the folder is gone.

    Raises OSError, for example when no descriptor is left.
    """
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        file = Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fd), folder.lstat()):
            return file
    return None
