"""The columns of an archive: what a record says of itself, then the columns of its trajectories.

A row is a trajectory. docs/reference/archive.md has every column.
"""

from functools import cache

import msgspec
import pyarrow as pa

from shmbridge.errors import ArchiveUnreadable
from shmbridge.record.meta_types import META_TYPES
from shmbridge.schema import Column, Columns, Kind, arrow_type

VERSION = "1"
_MOST_NULLS = 1024
_VERSION, _COLUMNS = b"shmbridge.archive", b"shmbridge.columns"

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
        said = msgspec.json.decode(metadata[_COLUMNS], type=list[tuple[str, str]])
        about = {
            key.decode(): value.decode()
            for key, value in metadata.items()
            if key.startswith(b"shmbridge.") and key not in (_VERSION, _COLUMNS)
        }
        columns = Columns(Column.decode(bytes.fromhex(raw)) for _, raw in said)
        names = {name: file_name for name, (file_name, _) in zip(columns, said, strict=True)}
        return cls(columns, about, names)

    def with_columns(self, more: Columns) -> "Layout":
        """Returns a layout that has the columns of `more` too, in their types; itself if it has them."""
        if all(name in self.columns and self.columns[name].same_type(each) for name, each in more.items()):
            return self
        return Layout(Columns([*self.columns.order, *more.order]), self.about)


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
