"""Finishes what a killed recorder left in a folder, and copies a folder into one file: each record once."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from shmbridge.archive import parts, refusals
from shmbridge.archive.keys import SeenKeys
from shmbridge.archive.layout import OF_RECORD, ORIGIN, Layout, has_origin
from shmbridge.archive.parts import FinishedFile, Format
from shmbridge.archive.reading import batches_of, layout_of
from shmbridge.errors import ArchiveUnreadable, ArchiveUnwritable


@dataclass
class Exported:
    """What a folder holds: records, and the last sequence of each producer; what was finished in it."""

    records: int = 0
    rows: int = 0
    again: int = 0  # records that were there twice, left out of a copy
    reached: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # records of each producer
    finished: list[str] = field(default_factory=list)
    out: str | None = None


def finish_folder(folder: str | Path, kind: Format = "parquet") -> Exported:
    """Finishes the streams in a folder whose recorder is gone, and says what it holds. Blocks for the disk.

    Raises ArchiveTaken while a recorder writes to it, ArchiveUnreadable, ArchiveUnwritable, ArchiveFull.
    """
    folder = Path(folder)
    with refusals.reading(folder):
        found = parts.parts_of(folder)
    if not found:
        raise ArchiveUnreadable(
            f"{folder} holds no part-*.parquet, .arrow or .arrows",
            hint="name a folder that `shmbridge record` or a Recorder wrote",
        )
    with refusals.writing(folder), parts.recording(folder):
        finished = [str(path) for path in parts.finish_left(folder, kind)]
    seen = parts.keys_of(folder)
    counts = seen.counts()
    return Exported(sum(counts.values()), reached=seen.reached(), counts=counts, finished=finished)


def copy_folder(folder: str | Path, out: str | Path, kind: Format = "parquet") -> Exported:
    """Copies a folder into one file with the columns of all its parts. Beside a living recorder too.

    Blocks for the disk. The file appears when it is whole; one of that name is replaced.

    Raises ArchiveUnreadable, ArchiveUnwritable, ArchiveFull.
    """
    out, seen, done = Path(out), SeenKeys(), Exported(out=str(out))
    layout = layout_of(folder)
    if out.exists() and not out.is_file():
        raise ArchiveUnwritable(f"{out} is not a file", hint="give the path of the file to write")
    writing = out.with_name(f"{out.name}.{os.getpid()}{parts.WRITING}")
    try:
        with refusals.writing(out):
            with FinishedFile(writing, layout.schema, kind) as file:
                for of_part, batches, path in batches_of(folder):
                    for batch in batches:
                        with refusals.reading(path):
                            new = _new_rows(batch, seen, done)
                            rows = _with_columns(new, of_part, layout)
                        if new.num_rows:
                            done.rows += new.num_rows
                            file.write(rows)
            os.replace(writing, out)
    except BaseException:
        with suppress(OSError):
            writing.unlink(missing_ok=True)
        raise
    done.reached, done.counts = seen.reached(), seen.counts()
    done.records = sum(done.counts.values())
    return done


def _new_rows(batch: pa.RecordBatch, seen: SeenKeys, done: Exported) -> pa.RecordBatch:
    """Returns the rows of the records that were not seen before."""
    row = batch.column("record_row").to_numpy(zero_copy_only=False)
    starts = np.flatnonzero(row == 0)
    firsts = batch.select(["producer_id", "sequence"]).take(pa.array(starts)).to_pydict()
    new = [
        seen.add(producer_id, sequence)
        for producer_id, sequence in zip(firsts["producer_id"], firsts["sequence"], strict=True)
    ]
    done.again += len(new) - sum(new)
    if all(new):
        return batch
    rows = np.diff(np.append(starts, len(row)))
    return batch.filter(pa.array(np.repeat(np.array(new, np.bool_), rows)))


def _with_columns(batch: pa.RecordBatch, of_part: Layout, layout: Layout) -> pa.RecordBatch:
    """Returns the batch with the columns of `layout`, in its order; its part may name them otherwise."""
    part_names: dict[str, str | None] = dict.fromkeys(OF_RECORD)
    if not has_origin(batch.schema, of_part.names):
        del part_names[ORIGIN]
    part_names |= {layout.names[name]: here for name, here in of_part.names.items()}
    try:
        arrays = [
            batch.column(part_names[each.name] or each.name).cast(each.type)
            if each.name in part_names
            else pa.nulls(batch.num_rows, each.type)
            for each in layout.schema
        ]
    except pa.ArrowException as wrong:
        raise ArchiveUnreadable(
            f"a column has two types in the parts of this folder: {wrong}",
            hint="export the parts of each type from a folder of their own",
        ) from wrong
    return pa.RecordBatch.from_arrays(arrays, schema=layout.schema)
