"""Groups of every kind of column, and the comparison of a record with what was put of it."""

import os
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

import shmbridge
from shmbridge.archive.recorder import FlatRecord, flat_record
from shmbridge.put import FlatColumn
from shmbridge.schema import Tag, columns_of

NUMBERS = [
    pa.int8(),
    pa.uint16(),
    pa.uint32(),
    pa.int64(),
    pa.uint64(),
    pa.float16(),
    pa.float64(),
    pa.bool_(),
]
SCHEMA = pa.schema(
    [(f"list_{kind}", pa.list_(kind)) for kind in NUMBERS]
    + [(f"one_{kind}", kind) for kind in NUMBERS]
    + [("lists", pa.list_(pa.list_(pa.float32()))), ("named", pa.map_(pa.utf8(), pa.float32()))]
    + [("raw", pa.binary()), ("split", pa.utf8())]
    + [pa.field("of_record", pa.float32(), metadata={"per": "record"})]
)
TABLE = columns_of(SCHEMA)
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def numbers(random: np.random.Generator, dtype: np.dtype[Any], count: int, *, finite: bool) -> np.ndarray:
    """Any bits that the dtype has: NaNs with payloads, -0.0, denormals."""
    if dtype == np.bool_:
        return random.random(count) < 0.5
    if dtype.kind != "f":
        return random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    made = random.integers(0, 256, count * dtype.itemsize, np.uint8).view(BITS[dtype.itemsize]).view(dtype)
    made = np.where(random.random(count) < 0.2, dtype.type(-0.0), made)
    return np.where(np.isfinite(made), made, dtype.type(1)) if finite else made


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """A group that `put` takes, of some of the columns, some null, empty, or with null rows."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    rows = len(lengths)
    group: dict[str, Any] = {"tokens": [random.integers(0, 1000, n).astype(np.int32) for n in lengths]}
    chosen = draw(st.sets(st.sampled_from(PLAIN), max_size=12))
    for name in sorted(chosen):
        column, form = TABLE[name], draw(st.sampled_from(["values", "nulls", "null", "[]", "{}"]))
        if form in ("null", "[]", "{}"):
            group[name] = {"null": None, "[]": [], "{}": {}}[form]
            continue
        of_rows = lengths if column.per_token else random.integers(0, 4, rows).tolist()
        made = _rows(random, column, of_rows)
        if form == "nulls" and not column.per_record:
            made = [None if random.random() < 0.4 else row for row in made]
            if column.kind == 0:  # numbers through a list: the value of a NaN, not its payload, is kept
                made = [None if row is None else row.item() for row in made]
        group[name] = made
    return group


PLAIN = sorted(
    set(TABLE) - {"tokens", "step_ends", "step_rewards", "prompt_length", "token_versions", "masks"}
)


def _rows(random: np.random.Generator, column: Any, lengths: list[int]) -> Any:
    kind, count = column.type_name, len(lengths)
    if column.per_record:
        if column.kind == 4:
            return {"a": [1, None, "ü"]}
        return numbers(random, column.dtype, 1, finite=column.finite)
    if column.name in ("messages", "overrides", "images"):
        return [[{"role": "user", "content": "x" * n}] for n in lengths]
    if kind == "utf8":
        return ["é" * n for n in lengths]
    if kind == "binary":
        return [random.bytes(n) for n in lengths]
    if kind.startswith("map"):
        return [{f"k{at}": float(np.float32(random.normal())) for at in range(n)} for n in lengths]
    if kind.startswith("list<list"):
        return [
            [numbers(random, column.dtype, random.integers(0, 3), finite=column.finite) for _ in range(n)]
            for n in lengths
        ]
    if kind.startswith("list"):
        return [numbers(random, column.dtype, n, finite=column.finite) for n in lengths]
    return numbers(random, column.dtype, count, finite=column.finite)


def contents(record: Any) -> dict[str, Any]:
    """What a record holds, to the bit; without what differs between two puts."""
    flat: FlatRecord = flat_record(record)
    meta = flat.meta
    said = (meta.env_name, meta.group_id, meta.group_size, meta.env_id, meta.split, meta.uneven)
    versions = (meta.min_policy_version, meta.max_policy_version)
    columns = {name: bits(column) for name, column in flat.values.items()}
    return {"meta": said + versions, "tags": flat.tags, "columns": columns, "rows": flat.rows}


def bits(column: FlatColumn | Tag) -> Any:
    if isinstance(column, Tag):
        return column
    parts = [column.values, column.lengths, column.inner, column.valid]
    raw = [None if part is None else np.ascontiguousarray(part).tobytes() for part in parts]
    return (column.entries, *raw, column.keys)


def fresh(name: str) -> str:
    """A bridge's name of this process."""
    return f"t-{name}-{os.getpid()}"


def put_again(record: Any, producer: shmbridge.Producer) -> None:
    """Puts an archived record as `replay` does."""
    producer.put(
        record.group,
        group_id=record.group_id,
        group_size=record.group_size,
        policy_version=(record.min_policy_version, record.max_policy_version),
        split=record.split,
    )
