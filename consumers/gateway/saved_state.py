"""The state that must survive a gateway besides the lanes: the run and the remote environments, in a small
owner-only file. Any thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from contextlib import suppress
from typing import Any

import msgspec

from shmbridge.config import Run
from shmbridge.segments import gateway_directory

log = logging.getLogger(__name__)

_VERSION = 1


class SavedEnv(msgspec.Struct, frozen=True):
    """A remote environment as it registered, with the number and the name it was given."""

    env_id: int
    wandb_name: str
    desired_name: str
    max_token_length: int
    group_size: int
    weight: float
    min_batch_allocation: float | None = None
    connected: bool = True
    silent: bool = False  # in default mode: it has no lane until its next request


class Saved(msgspec.Struct, frozen=True):
    """The file. `step` is that of the next batch to form: batches that were not read are counted again."""

    version: int = _VERSION
    compat: str = "default"
    run: Run | None = None
    started: bool = False
    step: int = 0
    envs: list[SavedEnv] = []
    next_env_id: int = 0


class StateFile:
    """The file of one bridge. A second gateway of that bridge reads and writes nothing."""

    def __init__(self, bridge: str) -> None:
        self._folder = gateway_directory(bridge)
        self._lock = threading.Lock()
        self._fd = -1
        self.saved = Saved()

    def open(self) -> bool:
        """Locks and reads the file; returns False if another gateway has it. Never raises for its content."""
        for _ in range(100):
            with suppress(FileExistsError, FileNotFoundError):
                self._folder.mkdir(mode=0o700)
                self._folder.chmod(0o700)  # whatever the umask takes away
            try:
                self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if os.fstat(self._fd).st_uid != os.geteuid():
                    raise PermissionError(f"{self._folder} is another user's")
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.stat(self._folder), os.fstat(self._fd)):
                    self._read()
                    return True
            except FileNotFoundError:  # `clean` removed it first
                pass
            except OSError as wrong:
                log.warning("registrations will not survive a restart of this gateway: %s", wrong)
                self.close()
                return False
            self.close()
        return False

    def _read(self) -> None:
        try:
            found = msgspec.json.decode((self._folder / "state.json").read_bytes(), type=Saved)
            if found.version != _VERSION:
                raise ValueError(f"it has version {found.version}, this gateway writes {_VERSION}")
            self.saved = found
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as wrong:
            log.error("%s is ignored: %s", self._folder / "state.json", wrong)

    def update(self, **changes: Any) -> None:
        """Changes some fields, also in the file, which is replaced whole or not at all."""
        with self._lock:
            self.saved = msgspec.structs.replace(self.saved, **changes)
            if self._fd < 0:
                return
            try:
                self._write(msgspec.json.encode(self.saved))
            except OSError as full:
                log.error("the state of the gateway was not written: %s", full)

    def _write(self, text: bytes) -> None:
        fd = os.open(
            "state.new",
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=self._fd,
        )
        with open(fd, "wb", closefd=True) as file:
            file.write(text)  # all of it, or an OSError: a full mount takes a part
        os.replace("state.new", "state.json", src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def forget(self) -> None:
        """Removes the file: there are no registrations any more."""
        with self._lock:
            self.saved = Saved(compat=self.saved.compat)
            if self._fd >= 0:
                with suppress(FileNotFoundError):
                    os.unlink("state.json", dir_fd=self._fd)

    def close(self) -> None:
        """Releases the file for others; removes an empty folder."""
        if self._fd >= 0:
            with suppress(OSError):
                self._folder.rmdir()
            os.close(self._fd)
            self._fd = -1
