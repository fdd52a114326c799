"""Reads an archive: every record once, in the order in which it was recorded."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from shmbridge.archive.decode import ArchivedRecord as ArchivedRecord
from shmbridge.archive.decode import records_of
from shmbridge.archive.keys import SeenKeys
from shmbridge.archive.layout import Layout
from shmbridge.archive.parts import parts_of
from shmbridge.errors import ArchiveUnreadable


def read_archive(folder: str | Path) -> Iterator[ArchivedRecord]:
    """Yields every record of a folder once, by (producer_id, sequence), in recorded order.

    Blocks for the disk; any thread. Reads beside a living recorder, up to the last whole message.

    Raises:
        ArchiveUnreadable: the folder holds no part, or a part is no archive of this build.
    """
    seen = SeenKeys()
    for layout, batches in batches_of(folder):
        for batch in batches:
            for record in records_of(batch, layout):
                if seen.add(record.producer_id, record.sequence):
                    yield record


def layout_of(folder: str | Path) -> Layout:
    """Returns a layout with the columns of all parts. Raises ArchiveUnreadable."""
    found: Layout | None = None
    for layout, _ in batches_of(folder):
        found = layout if found is None else found.with_columns(layout.columns)
    assert found is not None
    return found


def batches_of(folder: str | Path) -> Iterator[tuple[Layout, Iterator[pa.RecordBatch]]]:
    """Yields each part's layout and its batches, in order. Raises as read_archive."""
    folder = Path(folder)
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
            opened = next(
                again for again in parts_of(folder) if again.number == part.number
            ).schema_and_batches()
        except (pa.ArrowException, OSError) as wrong:
            raise ArchiveUnreadable(
                f"{part.path} cannot be read: {wrong}", hint="remove that file to read the others"
            ) from wrong
        if opened is not None:
            yield Layout.of_schema(opened[0], part.path), opened[1]
