"""The columns of an archive, the records that a folder holds, and what is refused of its files.

A row is a trajectory. docs/reference/archive.md has every column.
"""

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec
import pyarrow as pa

from shmbridge.errors import ArchiveFull, ArchiveUnreadable, ArchiveUnwritable, ShmBridgeError
from shmbridge.record.arrow import META_TYPES, checked_batch
from shmbridge.schema import Column, Columns, Kind, Tag, arrow_type

VERSION = "1"  # of the columns
REVISION = "2"  # of the bytes of a file: from 2 on they carry checksums
_MOST_NULLS = 1024
_VERSION, _COLUMNS, _REVISION = b"shmbridge.archive", b"shmbridge.columns", b"shmbridge.revision"

# Files of earlier builds, which knew no relay, do not have it; such builds pass over it.
ORIGIN = "record_origin"
ORIGIN_TYPE = pa.struct(
    [("node", pa.utf8()), ("producer_id", pa.utf8())]
    + [(name, pa.int64()) for name in ("sequence", "waited_ns", "transfer_ns")]
)
# Of the record that a row belongs to, and what its exact replay needs.
OF_RECORD: dict[str, pa.DataType] = {
    "producer_id": META_TYPES["producer_id"],
    "sequence": pa.int64(),  # not uint64: the files that there are have it so, and readers join on it
    "record_row": pa.int32(),
    **{name: kind for name, kind in META_TYPES.items() if name not in ("producer_id", "sequence")},
    "record_columns": pa.utf8(),
    "record_uneven": pa.bool_(),
    "record_odd": pa.binary(),
    ORIGIN: ORIGIN_TYPE,
}
_WITHOUT_ORIGIN = {name: kind for name, kind in OF_RECORD.items() if name != ORIGIN}
# What record_columns says of a column.
SAID = {Tag.VALUES: "values", Tag.NULL: "null", Tag.EMPTY_LIST: "[]", Tag.EMPTY_MAP: "{}"}
TAGS = {said: tag for tag, said in SAID.items()}
KEYS = ("producer_id", "sequence", "record_row")
_MAY_BE_NULL = ("env_id", "record_odd", ORIGIN)
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


class Layout:
    """The columns of one file: `names` gives the file's name of each column of trajectories."""

    def __init__(
        self, columns: Columns, about: dict[str, str] | None = None, names: dict[str, str] | None = None
    ) -> None:
        self.columns = columns
        self.names = names or {name: _free(name) for name in columns}
        self.about = dict(about or {})
        self._nulls: dict[tuple[str, int], pa.Array] = {}
        said = [[file_name, columns[name].encode().hex()] for name, file_name in self.names.items()]
        metadata = {
            _VERSION.decode(): VERSION,
            _COLUMNS.decode(): msgspec.json.encode(said).decode(),
            **self.about,
        }
        self.schema = pa.schema(
            [pa.field(name, kind) for name, kind in OF_RECORD.items()]
            + [pa.field(self.names[name], file_type(columns[name])) for name in columns],
            metadata=metadata,
        )

    def nulls(self, name: str, rows: int) -> pa.Array:
        """Returns a column without values; the last ones asked for are kept."""
        if len(self._nulls) > _MOST_NULLS:
            self._nulls.clear()
        found = self._nulls.get((name, rows))
        if found is None:
            found = self._nulls[name, rows] = pa.nulls(rows, file_type(self.columns[name]))
        return found

    @classmethod
    def of_schema(cls, schema: pa.Schema, where: object) -> "Layout":
        """Returns the layout that a file's schema states. Raises ArchiveUnreadable."""
        metadata = schema.metadata or {}
        if metadata.get(_VERSION, b"").decode() != VERSION or _COLUMNS not in metadata:
            raise ArchiveUnreadable(
                f"{where} is no archive of this build: it says version {metadata.get(_VERSION, b'none')!r}, "
                f"this build reads {VERSION!r}",
                hint="name a folder that `shmbridge record` or a Recorder wrote",
            )
        if (revision := revision_of(schema)) not in (None, REVISION):
            raise ArchiveUnreadable(
                f"{where} has revision {revision}, and this build reads files of none, and of {REVISION}",
                hint="read it with the release of shmbridge that wrote it",
            )
        said = msgspec.json.decode(metadata[_COLUMNS], type=list[tuple[str, str]])
        about = {
            key.decode(): value.decode()
            for key, value in metadata.items()
            if key.startswith(b"shmbridge.") and key not in (_VERSION, _COLUMNS, _REVISION)
        }
        columns = Columns(Column.decode(bytes.fromhex(raw)) for _, raw in said)
        names = {name: file_name for name, (file_name, _) in zip(columns, said, strict=False)}
        if not len(columns) == len(said) == len({*names.values()} - _WITHOUT_ORIGIN.keys()):
            raise ArchiveUnreadable(
                f"{where} names {len(said)} columns, some of them twice, or as a record names its own",
                hint="move that file away to read the others",
            )
        return cls(columns, about, names)

    def checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns a batch of a file of this layout, once all in it is true. Raises InvalidRecord."""
        types = OF_RECORD if has_origin(batch.schema, self.names) else _WITHOUT_ORIGIN
        own = {file_name: file_type(self.columns[name]) for name, file_name in self.names.items()}
        return checked_batch(batch, types | own, (*_MAY_BE_NULL, *own))

    def with_columns(self, more: Columns) -> "Layout":
        """Returns a layout that has the columns of `more` too, in their types; itself if it has them."""
        if all(name in self.columns and self.columns[name].same_type(each) for name, each in more.items()):
            return self
        return Layout(Columns([*self.columns.order, *more.order]), self.about)


def checked_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the key of each row of a batch, and its number in its record. Raises InvalidRecord."""
    return checked_batch(batch, {name: OF_RECORD[name] for name in KEYS})


def marked(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of a file that carries checksums."""
    return schema.with_metadata({**(schema.metadata or {}), _REVISION: REVISION.encode()})


def revision_of(schema: pa.Schema) -> str | None:
    """Returns the revision that a file's schema states; None for one without checksums."""
    said = (schema.metadata or {}).get(_REVISION)
    return None if said is None else said.decode(errors="replace")


def has_origin(schema: pa.Schema, names: dict[str, str]) -> bool:
    """Returns whether a file says where its records came from; `names` are its columns of trajectories."""
    return ORIGIN in schema.names and ORIGIN not in names.values()


@cache
def file_type(column: Column) -> pa.DataType:
    """Returns the Arrow type of a column in a file: a map is a list of key and value, for every reader."""
    if column.kind is not Kind.MAP:
        return arrow_type(column)
    value = arrow_type(column).item_type
    return pa.list_(pa.struct([pa.field("key", pa.utf8()), pa.field("value", value)]))


def _free(name: str) -> str:
    """Returns the file's name of a column: its own, unless what a record says of itself has that name."""
    return f"column_{name}" if _bare(name) in OF_RECORD else name


def _bare(name: str) -> str:
    """Returns a name without what `_free` puts before it, so that two columns never get one name."""
    while name.startswith("column_"):
        name = name.removeprefix("column_")
    return name


class SeenKeys:
    """A set of (producer_id, sequence). Small while each producer's sequences have few gaps."""

    def __init__(self) -> None:
        # Per producer the starts and the ends of its ranges; ends are exclusive.
        self._ranges: dict[str, tuple[list[int], list[int]]] = {}

    def has(self, producer_id: str, sequence: int) -> bool:
        """Returns whether a key was added."""
        starts, ends = self._ranges.get(producer_id, ([], []))
        at = bisect_right(starts, sequence) - 1
        return at >= 0 and sequence < ends[at]

    def add(self, producer_id: str, sequence: int) -> bool:
        """Adds a key; returns whether it is new."""
        if self.has(producer_id, sequence):
            return False
        starts, ends = self._ranges.setdefault(producer_id, ([], []))
        at = bisect_right(starts, sequence)
        joins_left = at > 0 and ends[at - 1] == sequence
        joins_right = at < len(starts) and starts[at] == sequence + 1
        if joins_left and joins_right:
            ends[at - 1] = ends.pop(at)
            starts.pop(at)
        elif joins_left:
            ends[at - 1] = sequence + 1
        elif joins_right:
            starts[at] = sequence
        else:
            starts.insert(at, sequence)
            ends.insert(at, sequence + 1)
        return True

    def reached(self) -> dict[str, int]:
        """Returns the last sequence of each producer."""
        return {producer_id: ends[-1] - 1 for producer_id, (_, ends) in sorted(self._ranges.items())}

    def counts(self) -> dict[str, int]:
        """Returns how many records there are of each producer."""
        return {
            producer_id: sum(ends) - sum(starts)
            for producer_id, (starts, ends) in sorted(self._ranges.items())
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)


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
