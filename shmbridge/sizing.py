"""Sizes: a record of a given shape, a lane for a batch, the mount for all lanes. Arithmetic only.

Follows the record layout of `_ext/c/layout.h`. The same in words: docs/reference/sizing.md.
"""

from collections.abc import Iterable, Mapping, Sequence

from shmbridge._ext import header
from shmbridge._ext.put import CHECKED_COLUMNS
from shmbridge.schema import Column, Columns, Kind, standard_columns

# tokens, mask, logprobs, advantages and token rewards: 17 bytes a token.
DENSE_CORE = ("tokens", "loss_mask", "inference_logprobs", "advantages", "token_rewards")

SMALLEST_LANE = 64 << 10
MOST_RECORDS = 1 << 13  # un-released records in one lane
_FEWEST_SLOTS = 1 << 6
_BYTES_PER_SLOT_SHIFT = 13
_LINE = 64
_DIRECTORY_ENTRY = 64

Shape = int | tuple[int, int]


def slots_of(lane_bytes: int) -> int:
    """Returns the most records that such a lane holds: a power of two, one per 8 KiB, from 64 to 8192."""
    return max(
        _FEWEST_SLOTS, min(MOST_RECORDS, 1 << max((lane_bytes >> _BYTES_PER_SLOT_SHIFT).bit_length() - 1, 0))
    )


def record_bytes(
    tokens: int | Sequence[int],
    rows: int = 1,
    columns: Iterable[str] | Mapping[str, Shape | None] = DENSE_CORE,
    *,
    table: Columns | None = None,
    group_id_bytes: int = _LINE,
) -> int:
    """Returns the bytes of one record in a lane, exactly as packed if a row of it carries checks; without
    checks a record takes a few lines less.

    Args:
        tokens: tokens of each row, or a list with one number per row.
        rows: rows, where `tokens` is one number.
        columns: names of the record's columns. A mapping also gives the values per row where that is not the
            number of tokens: bytes of a text, (lists in a row, values in a list),
            (pairs in a row, bytes of a key); None for "as many as tokens".
        table: columns beyond the standard ones, as `schema.columns_of` gives them.
        group_id_bytes: length of the group id; ids of up to 64 bytes cost the same.
    """
    lengths = [tokens] * rows if isinstance(tokens, int) else list(tokens)
    shapes = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
    known = standard_columns() if table is None else table
    lines = _lines(_DIRECTORY_ENTRY * len(shapes) + group_id_bytes)
    return _LINE * (lines + sum(_column_lines(known[name], lengths, shape) for name, shape in shapes.items()))


def _column_lines(column: Column, lengths: list[int], shape: Shape | None) -> int:
    """Returns the lines of one column: its lengths, its inner lengths, its values, its keys."""
    item, rows = column.dtype.itemsize, 1 if column.per_record else len(lengths)
    if column.kind is Kind.SCALAR:
        return _lines(item * rows)
    if column.kind in (Kind.LIST, Kind.BYTES):
        if shape is None and not column.per_token:
            raise ValueError(
                f"column {column.name!r} has not one value per token: say how many a row has, "
                f"{{{column.name!r}: 100}}"
            )
        values = sum(lengths) if shape is None else rows * _count(column, shape)
        checks = _lines(8 * rows) if column.name in CHECKED_COLUMNS else 0
        return _lines(4 * rows) + _lines(item * values) + checks
    outer, inner = _pair(column, shape)
    lists = rows * outer
    if column.kind is Kind.MAP:  # one value and one key, of `inner` bytes, per pair
        return _lines(4 * rows) + _lines(4 * lists) + _lines(item * lists) + _lines(inner * lists)
    return _lines(4 * rows) + _lines(4 * lists) + _lines(item * lists * inner)


def _count(column: Column, shape: Shape) -> int:
    if isinstance(shape, int):
        return shape
    raise ValueError(
        f"column {column.name!r} is {column.type_name}: one number says how many values a row has"
    )


def _pair(column: Column, shape: Shape | None) -> tuple[int, int]:
    if isinstance(shape, tuple):
        return shape
    raise ValueError(
        f"column {column.name!r} is {column.type_name}: two numbers say what a row has, {{{column.name!r}: "
        f"(100, 8)}}"
    )


def _lines(size: int) -> int:
    return -(-size // _LINE)


def records_held(
    groups: int,
    producers: int = 1,
    *,
    prefetch: int = 1,
    hold: str = "step",
    records_per_group: int = 1,
    steps: int = 1,
) -> int:
    """Returns the records of one lane that are un-released at a time, if every producer brings its share of
    each batch.

    Under hold="step" those of the batches of `steps` steps and of `prefetch` batches gathered ahead; under
    "gather" only the latter.
    """
    if hold not in ("step", "gather") or min(groups, producers, records_per_group, steps) < 1 or prefetch < 0:
        raise ValueError(
            f'hold={hold!r} is "step" or "gather"; groups, producers, records_per_group and steps are 1 at '
            "least, prefetch 0"
        )
    batches = steps + prefetch if hold == "step" else max(prefetch, 1)
    return -(-batches * groups * records_per_group // producers)


def lane_bytes_for(
    record: int,
    groups: int,
    producers: int = 1,
    *,
    prefetch: int = 1,
    hold: str = "step",
    records_per_group: int = 1,
    steps: int = 1,
    same_size: bool = False,
) -> int:
    """Returns the least `lane_bytes` with which such batches are always filled, and a producer can still
    write while they are held.

    Args:
        record: bytes of the largest record; see `record_bytes`.
        groups: groups in a batch.
        producers: producers that live at the same time and bring about as much each.
        prefetch, hold: as given to `Consumer.batches`.
        records_per_group: more than 1 where groups are put in fragments.
        steps: steps that are held: 1, or those between two checkpoints under release_at="checkpoint".
        same_size: all records are as large as the largest. Otherwise the result includes gaps between records
            of other sizes.

    Raises:
        ValueError: one lane would have to hold more records than a lane can.
    """
    held = records_held(
        groups, producers, prefetch=prefetch, hold=hold, records_per_group=records_per_group, steps=steps
    )
    return lane_bytes_holding(held, record, same_size=same_size)


def lane_bytes_holding(held: int, record: int, *, same_size: bool = False) -> int:
    """Returns the least `lane_bytes` that always has room for one more record of `record` bytes beside `held`
    of at most that size.

    `held` records leave up to `held` + 1 gaps, each of which may be a line too small; records of one size
    leave none. Raises ValueError if no lane holds so many.
    """
    if held + 1 > MOST_RECORDS:
        raise ValueError(
            f"{held + 1} records in one lane; {MOST_RECORDS} is the limit: more producers, fewer groups, or "
            "groups put whole"
        )
    record = _LINE * _lines(record)
    gaps = record if same_size else (held + 1) * (record - _LINE) + _LINE
    slots = 1 << held.bit_length()  # more than `held`
    need = max(
        held * record + gaps,
        2 * record,
        slots << _BYTES_PER_SLOT_SHIFT if slots > _FEWEST_SLOTS else 0,
        SMALLEST_LANE,
    )
    unit = 1 << 20 if need > 1 << 20 else SMALLEST_LANE
    return -(-need // unit) * unit


def segment_bytes(lane_bytes: int) -> int:
    """Returns the bytes of one lane on the shm mount, in whole pages: data, 20 KiB, 140 bytes per slot."""
    size: int = header.lane_geometry(lane_bytes, slots_of(lane_bytes))[-1]
    return size


def mount_bytes_for(lane_bytes: int, producers: int, *, weights_bytes: int = 0) -> int:
    """Returns the bytes of a bridge on the shm mount: lanes, control segment, two versions of the weights."""
    return producers * segment_bytes(lane_bytes) + header.control_bytes + 2 * weights_bytes


def as_option(size: int) -> str:
    """Returns a size in the form of an option: `12M`, `192K`. Rounds up to whole KiB."""
    return f"{size >> 20}M" if size % (1 << 20) == 0 else f"{-(-size >> 10)}K"


def what_to_raise(held: int, largest: int, same_size: bool) -> str:
    """Returns advice for lanes that must hold `held` records of `largest` bytes, and room for one more."""
    try:
        size = as_option(lane_bytes_holding(held, largest, same_size=same_size))
    except ValueError as too_many:
        return str(too_many)
    return (
        f"raise lane_bytes of the producers to at least {size} each ({held} records and room for one more), "
        "or ask for fewer groups"
    )
