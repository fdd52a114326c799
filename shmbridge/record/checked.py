"""Arrow from outside, checked in full before anything in it is used as a length or as a value.

Whatever comes as Arrow from a file or from another node comes through here: batches of recordings in every
format, what a record of them holds inside (`record_odd`), and the heads of a relay's parcels. What is handed
out has the declared columns in the declared types, offsets that rise and lie inside of their values, UTF-8
text, and no null where none may be: lengths made of it add up.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa

from shmbridge.errors import InvalidRecord, shown

MOST_ROWS = (1 << 31) - 1


def checked_batch(
    batch: pa.RecordBatch, types: Mapping[str, pa.DataType], nullable: Collection[str] = ()
) -> pa.RecordBatch:
    """Returns the columns of `types` out of a batch, in that order, once all of them are true. Never blocks.

    Args:
        batch: as Arrow has read it; not trusted. Columns that are not in `types` are left out.
        types: each column that must be there, once, and its type.
        nullable: those of them whose rows may be null. What a row holds inside never is.

    Raises InvalidRecord, which names the column, and the row where one is to blame.
    """
    with _arrow_errors():
        if batch.num_rows > MOST_ROWS:
            raise InvalidRecord(f"{batch.num_rows} rows in one batch, allowed are {MOST_ROWS}")
        numbers = []
        for name, declared in types.items():
            found = batch.schema.get_all_field_indices(name)
            if len(found) != 1:
                has = f"{len(found)} columns" if found else "no column"
                raise InvalidRecord(f"it has {has} {shown(name)}", column=name)
            with _arrow_errors(name):
                _check_column(name, batch.column(found[0]), declared, name in nullable)
            numbers += found
        return batch.select(numbers)


def only_batch(
    raw: "pa.Buffer | memoryview | bytes", types: Mapping[str, pa.DataType], nullable: Collection[str] = ()
) -> pa.RecordBatch:
    """Returns the one batch of an Arrow stream that lies in memory, over that memory, checked like any other.

    Its columns are some of `types`. Never blocks. Raises InvalidRecord for anything else: a stream that is
    cut, that has several batches or none, or other columns.
    """
    with _arrow_errors():
        with pa.ipc.open_stream(pa.py_buffer(raw)) as stream:
            batches = [*stream]
        if len(batches) != 1:
            raise InvalidRecord(f"a stream of {len(batches)} batches, not of one")
        (batch,) = batches
        if other := next((name for name in batch.schema.names if name not in types), None):
            raise InvalidRecord(f"column {shown(other)} does not belong there", column=other)
        return checked_batch(batch, {name: types[name] for name in batch.schema.names}, nullable)


@contextmanager
def _arrow_errors(column: str = "") -> Iterator[None]:
    """Turns whatever Arrow makes of bytes that are not its own, or of names that are not text."""
    try:
        yield
    except InvalidRecord:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError) as wrong:
        said = first_line(wrong)
        raise InvalidRecord(f"column {shown(column)}: {said}" if column else said, column=column) from None


def first_line(wrong: BaseException) -> str:
    """Returns the reason that an error of Arrow gives, in one line."""
    return (str(wrong).strip() or type(wrong).__name__).splitlines()[0]


def _check_column(name: str, array: pa.Array, declared: pa.DataType, nullable: bool) -> None:
    """Raises InvalidRecord unless an array is what its column is declared to be."""
    if array.type != declared:
        raise InvalidRecord(f"column {shown(name)} is {array.type}, and declared as {declared}", column=name)
    array.validate(full=True)
    if array.null_count and not nullable:
        row = array.is_null().index(True).as_py()
        raise InvalidRecord(f"column {shown(name)}, row {row}: null", column=name, row=row)
    if pa.types.is_struct(declared):
        holed = any(field.null_count != array.null_count for field in array.flatten())
    else:
        holed = _has_null_inside(array)
    if holed:
        raise InvalidRecord(f"column {shown(name)}: null inside of a row", column=name)


def _has_null_inside(array: pa.Array) -> bool:
    """Returns whether a list holds a null at any depth; rows of the array itself may be null."""
    if pa.types.is_list(array.type):
        inside = [array.values]
    elif pa.types.is_struct(array.type):
        inside = [array.field(number) for number in range(array.type.num_fields)]
    else:
        return False
    return any(each.null_count or _has_null_inside(each) for each in inside)
