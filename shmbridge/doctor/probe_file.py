"""A file on the shared-memory mount that leaves nothing there, however its process ends."""

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/dev/shm")
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


@contextlib.contextmanager
def probe_file(mount: Path = MOUNT) -> Iterator[int]:
    """Yields the descriptor of an empty file without a name, which the kernel frees with its last use."""
    fd = _open(mount)
    try:
        yield fd
    finally:
        os.close(fd)


def _open(mount: Path) -> int:
    how = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(mount, how | os.O_TMPFILE, 0o600)
    except OSError as wrong:
        if wrong.errno not in _NO_NAMELESS:
            raise
    path = mount / f".shmbridge-doctor.{os.getpid()}"
    # no signal comes between the file's name and the removal of it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        fd = os.open(path, how | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        return fd
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
