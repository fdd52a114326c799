"""What the disk or a damaged file refuses, as an error that names the file and one next action."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa

from shmbridge.errors import ArchiveFull, ArchiveUnreadable, ArchiveUnwritable, ShmBridgeError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DAMAGE = (
    pa.ArrowException,
    OSError,
    msgspec.MsgspecError,
    ValueError,
    LookupError,
    TypeError,
    OverflowError,
    RecursionError,
    ShmBridgeError,
)


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Turns what goes wrong while a part is read into ArchiveUnreadable.

    A part that is gone (FileNotFoundError) and want of memory stay as they are; not what Arrow cannot get for
    a size that the file states.
    """
    try:
        yield
    except pa.ArrowMemoryError as wrong:
        raise ArchiveUnreadable(
            f"{path} cannot be read: {_said(wrong)}",
            hint="it is damaged, or this process may use too little memory for it",
        ) from wrong
    except (ArchiveUnreadable, FileNotFoundError, MemoryError):
        raise
    except _DAMAGE as wrong:
        refused = isinstance(wrong, OSError) and wrong.errno is not None
        raise ArchiveUnreadable(
            f"{path} cannot be read: {_said(wrong)}",
            hint="see that this user may read it" if refused else "move that file away to read the others",
        ) from wrong


def is_full(wrong: OSError) -> bool:
    """Returns whether there is no room, rather than anything else wrong."""
    return wrong.errno in _FULL


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the disk refuses while `path` is written into ArchiveFull or ArchiveUnwritable."""
    try:
        yield
    except ShmBridgeError:
        raise
    except OSError as wrong:
        if is_full(wrong):
            raise ArchiveFull(
                f"no room for {path}: {_said(wrong)}", hint="make room, and do it again"
            ) from wrong
        raise unwritable(path, wrong) from wrong


def unwritable(path: Path, wrong: OSError) -> ArchiveUnwritable:
    """Returns the error for a file or folder that cannot be written."""
    hint = {
        errno.ENOENT: "make the folder first, or give another one",
        errno.ENOTDIR: "give a path whose folders are folders",
        errno.EEXIST: "give a folder, not a file",
        errno.EISDIR: "give a file, not a folder",
        errno.EACCES: "give a folder in which this user may write",
        errno.EPERM: "give a folder in which this user may write",
        errno.EROFS: "give a folder on a mount that can be written",
        errno.EIO: "give a folder on another disk: this one fails",
    }.get(wrong.errno or 0, "give another path")
    return ArchiveUnwritable(f"{path} cannot be written: {_said(wrong)}", hint=hint)


def _said(wrong: BaseException) -> str:
    """Returns the reason in one line, without what only a programmer reads."""
    number = getattr(wrong, "errno", None)
    said = wrong.message if isinstance(wrong, ShmBridgeError) else str(wrong)
    text = os.strerror(number) if number is not None else said
    return (text.strip() or type(wrong).__name__).splitlines()[0]
