"""Reads an archive: every record once, in the order in which it was recorded."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from shmbridge.archive import refusals
from shmbridge.archive.decode import ArchivedRecord as ArchivedRecord
from shmbridge.archive.decode import records_of
from shmbridge.archive.keys import SeenKeys
from shmbridge.archive.layout import Layout
from shmbridge.archive.parts import keys_of, parts_of
from shmbridge.errors import ArchiveUnreadable


def read_archive(folder: str | Path) -> Iterator[ArchivedRecord]:
    """Yields every record of a folder once, by (producer_id, sequence), in recorded order.

    Blocks for the disk; any thread. Reads beside a living recorder, up to the last whole message.

    Raises:
        ArchiveUnreadable: the folder holds no part, or a part is no archive of this build.
    """
    seen = SeenKeys()
    for layout, batches, path in batches_of(folder):
        for batch in batches:
            records = records_of(batch, layout)
            while True:
                with refusals.reading(path):
                    record = next(records, None)
                if record is None:
                    break
                if seen.add(record.producer_id, record.sequence):
                    yield record


def counts_of(folder: str | Path) -> dict[str, int]:
    """Returns how many records there are of each producer; reads a few columns. Raises as read_archive."""
    folder = Path(folder)
    with refusals.reading(folder):
        return keys_of(folder).counts()


def layout_of(folder: str | Path) -> Layout:
    """Returns a layout with the columns of all parts. Raises ArchiveUnreadable."""
    found: Layout | None = None
    for layout, _, path in batches_of(folder):
        with refusals.reading(path):
            found = layout if found is None else found.with_columns(layout.columns)
    if found is None:
        raise ArchiveUnreadable(f"{folder} holds no record", hint="record first, or name another folder")
    return found


def batches_of(folder: str | Path) -> Iterator[tuple[Layout, Iterator[pa.RecordBatch], Path]]:
    """Yields each part's layout, its batches, and its path, in order. Raises as read_archive."""
    folder = Path(folder)
    with refusals.reading(folder):
        parts = parts_of(folder)
    if not parts:
        raise ArchiveUnreadable(
            f"{folder} holds no part-*.parquet, .arrow or .arrows",
            hint="name a folder that `shmbridge record` or a Recorder wrote",
        )
    for part in parts:
        try:
            opened = part.schema_and_batches()
        except FileNotFoundError:  # finished by its recorder since the folder was listed
            part = next((again for again in parts_of(folder) if again.number == part.number), part)
            with refusals.reading(part.path):
                opened = part.schema_and_batches() if part.path.exists() else None
        if opened is not None:
            with refusals.reading(part.path):
                layout = Layout.of_schema(opened[0], part.path)
            yield layout, opened[1], part.path
