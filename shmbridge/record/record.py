"""One leased record of a lane, and a group of them; what goes back to Atropos, and what a relay sends.

Here, too: the calls that hand records out, and the warning about one that was handed out and never released;
checks stored beside a row's values, by which a trainer can tell that it has the very values that were put.
Imports nothing of Atropos. shmbridge/put/planner.py is the other end of a relayed record.
"""

import logging
import os
import queue
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shmbridge._ext.groups import NO_VERSION as NO_VERSION
from shmbridge._ext.groups import Group as Group
from shmbridge._ext.groups import GroupAssembler as GroupAssembler
from shmbridge._ext.lane import LaneReader
from shmbridge._ext.put import CHECKED_COLUMNS as CHECKED_COLUMNS
from shmbridge._ext.put import RowSampler
from shmbridge._ext.record import LeasedRecord, Ragged
from shmbridge._ext.record import Origin as Origin
from shmbridge._ext.record import RecordMeta as RecordMeta
from shmbridge._ext.weights import check_of as check_of
from shmbridge.errors import LeaseReleased, NoColumn, RecordUnreadable, no_column, shown
from shmbridge.record.columns import NamedColumns, RaggedLists, ReadableRecord, RecordColumns, columns_as_html
from shmbridge.schema import (
    ATROPOS_NO_LOGPROB,
    JSON_COLUMNS,
    LOGPROBS,
    Column,
    Columns,
    Kind,
    Tag,
    recorded_logprobs,
)
from shmbridge.segments import OneProcess, map_data_writable, start_apart

if TYPE_CHECKING:
    import pyarrow as pa

_LISTS = ("advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
_STEPS = ("step_rewards", "step_ends")
_JSON = ("messages", "overrides", "images", "group_overrides", "generation_params")


def scored_data(record: ReadableRecord) -> dict[str, Any]:
    """Returns the group as upstream's HTTP path would deliver it: the same keys, null, [] and {} told apart;
    plus what that path loses: rewards of steps, and the unknown keys in `extra`.
    """
    group: dict[str, Any] = {"tokens": record["tokens"].tolist(), "masks": _masks(record)}
    for name, source in (("scores", "score"), *((name, name) for name in (*_LISTS, *_STEPS))):
        if record.tag(source) is not None:
            group[name] = _value(record, source)
    for name in _JSON:
        if record.tag(name) is not None:
            group[name] = record.json(name) if name in record else _empty(record, name)
    if record.meta.env_id is not None:
        group["env_id"] = record.meta.env_id
    if "extra" in record:
        extra = record.json("extra")
        group.update(extra if isinstance(extra, dict) else {"extra": extra})
    return group


def _empty(record: ReadableRecord, name: str) -> Any:
    """Returns the content of a column without values: null, [] or {}."""
    tag = record.tag(name)
    return [] if tag is Tag.EMPTY_LIST else {} if tag is Tag.EMPTY_MAP else None


def _value(record: ReadableRecord, name: str) -> Any:
    if name not in record:
        return _empty(record, name)
    column = record[name]
    if name in LOGPROBS:
        values = recorded_logprobs(column.values, ATROPOS_NO_LOGPROB)
        column = Ragged(values, column.lengths, column.valid)
    if isinstance(column, (Ragged, RaggedLists)):
        return column.tolist()
    valid = record.valid(name)
    return [value if valid is None or valid[row] else None for row, value in enumerate(column.tolist())]


def _masks(record: ReadableRecord) -> Any:
    """Returns masks as they came, or rebuilt: the token where trained, -100 elsewhere."""
    if record.tag("masks") is not None:
        return _value(record, "masks")
    if "loss_mask" not in record:
        return None
    masks = record["loss_mask"].tolist()
    pairs = zip(record["tokens"], masks, strict=False)
    return [
        None
        if mask is None
        else [token if on else -100 for token, on in zip(row.tolist(), mask, strict=False)]
        for row, mask in pairs
    ]


@dataclass(frozen=True, slots=True)
class Lane:
    """The facts that every record of one lane shares."""

    producer_id: str
    env_name: str
    columns: Columns
    name: str  # of the segment
    origin_node: str = ""  # of a lane that a relay writes: where its records come from
    origin_producer_id: str = ""

    @property
    def source(self) -> str:
        """Id of the producer that put its records, on whatever node; several lanes in turn may bring them."""
        return self.origin_producer_id or self.producer_id

    @classmethod
    def of(cls, header: dict[str, Any], columns: Columns, name: str) -> "Lane":
        """Returns the facts of a lane's header, as `_ext.header.read_lane` returns it."""
        origin = header["origin_node"], header["origin_producer_id"]
        return cls(header["producer_id"], header["env_name"], columns, name, *origin)

    def describe_to(self, reader: LaneReader, table: bytes) -> None:
        """Registers this lane with its reader, so that its records refer to it.

        Raises LaneCorrupt if `table`, from which the columns were decoded, has changed.
        """
        reader.describe(
            self, table, tuple(self.columns), tuple(column.dtype for column in self.columns.order)
        )


class Record(RecordColumns, NamedColumns, OneProcess, LeasedRecord):
    """One record, leased: its memory does not change until release() was called and the last view of it is
    gone.

    `len(record)` counts rows; `record[name]` is a column; `name in record` and `record.columns` say which are
    present. A standard column is also an attribute, `record.tokens`, None where it is absent. As in a data
    frame, iteration gives the names of the columns. Use it as a context manager, which releases it unless it
    is left by an exception, or call release(). A record dropped without release stays un-released: it is
    handed out again if its meta and columns were never read, else the next consumer gets it. One thread at a
    time; views may go anywhere.
    """

    __slots__ = ()
    _instead = "pass copies of its columns: to_arrow(), to_scored_data(), or numpy arrays"

    @property
    def _lane(self) -> Lane:
        lane: Lane = self._lane_reader.about
        return lane

    @property
    def _lane_columns(self) -> Columns:
        """All columns its lane may carry, by name."""
        return self._lane.columns

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()

    def __repr__(self) -> str:
        meta = self.meta
        return (
            f"<Record {meta.producer_id}#{meta.sequence} group {meta.group_id} "
            f"{self.rows}/{meta.group_size} rows {self.token_count} tokens "
            f"v{meta.min_policy_version}{' redelivered' if meta.redelivered else ''}"
            f"{' released' if self.is_released else ''}>"
        )

    def _repr_html_(self) -> str:
        columns = {} if self.is_released else self._lane.columns
        return columns_as_html(
            repr(self), [(name, columns[name].type_name) for name in self.columns if name in columns]
        )

    def tag(self, name: str) -> Tag | None:
        """Returns whether a column holds values, null, [] or {}; None if it is absent."""
        tag = self._tag(name)
        return None if tag < 0 else Tag(tag)

    def to_arrow(self) -> "pa.RecordBatch":
        """Returns the record as a pyarrow.RecordBatch over the lane's own buffers; it holds the lease until
        it is dropped.

        Columns with one value per record repeat it. Raises ValueError for uneven records, which have no
        rectangular form, and RecordUnreadable for text that is not UTF-8.
        """
        from shmbridge.record.arrow import record_batch

        return record_batch(self)

    def to_scored_data(self) -> dict[str, Any]:
        """Returns the Atropos ScoredDataGroup this came from, a new dict; per-token floats are float32."""

        return scored_data(self)

    def json(self, name: str) -> Any:
        """Returns a column of JSON text, decoded: one value, or a list with one per row.

        KeyError if absent, RecordUnreadable if the text is not JSON.
        """
        if name not in JSON_COLUMNS:
            raise NoColumn(f"column {shown(name)} is not JSON text", hint=f"record[{shown(name)}]")
        try:
            values = [None if text is None else msgspec.json.decode(text) for text in self[name]]
            return values[0] if self._lane.columns[name].per_record else values
        except (msgspec.MsgspecError, RecursionError, IndexError) as wrong:
            raise self._unreadable(name, f"is no JSON: {wrong}") from None

    def _unreadable(self, name: str, why: object) -> RecordUnreadable:
        return RecordUnreadable(
            f"column {name!r} of record {self._sequence} of producer {self._lane.producer_id} {why}",
            hint="end that producer: it is broken, or something overwrites shared memory",
        )

    def _absent(self, name: str) -> NoColumn:
        return no_column(name, "record", self._lane.columns, self.columns)

    def _too_late(self, name: str) -> LeaseReleased:
        return LeaseReleased(
            f"column {name!r} was read after release()", hint="take the views you need before release()"
        )

    def _compound(self, name: str) -> Any:
        """Returns a column that is neither numbers nor lists of numbers."""
        column = self._lane.columns[name]
        if column.kind is Kind.LIST_LIST:
            return RaggedLists(
                self._values(name), self._lengths(name), self._inner_lengths(name), self.valid(name)
            )
        return self._maps(name) if column.kind is Kind.MAP else self._texts(column)

    def _texts(self, column: Column) -> list[Any]:
        raw, valid = self._values(column.name).tobytes(), self.valid(column.name)
        rows: list[Any] = _cut(raw, self._lengths(column.name))
        if column.text:
            rows = self._decoded(column.name, rows)
        return (
            rows
            if valid is None
            else [row if there else None for row, there in zip(rows, valid, strict=True)]
        )

    def _decoded(self, name: str, raw: list[bytes]) -> list[str]:
        try:
            return [each.decode() for each in raw]
        except UnicodeDecodeError as wrong:
            raise self._unreadable(name, f"is no text: {wrong}") from None

    def _maps(self, name: str) -> list[dict[str, float]]:
        keys = self._decoded(name, _cut(self._keys(name), self._inner_lengths(name)))
        pairs = iter(zip(keys, self._values(name).tolist(), strict=True))
        return [dict(next(pairs) for _ in range(count)) for count in self._lengths(name).tolist()]


def _moved(name: str) -> property:
    def moved(record: Record) -> Any:
        warnings.warn(
            f"record.{name} is record.meta.{name}: the short name goes with the next release",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(record.meta, name)

    return property(moved, doc=f"`record.meta.{name}`, under the name that it had on the record itself.")


# Properties and not __getattr__, which would make each look at any attribute a slow one.
for _name in {field.name for field in fields(RecordMeta)}.difference(dir(Record)):
    setattr(Record, _name, _moved(_name))


def _cut(raw: bytes, lengths: np.ndarray[Any, Any]) -> list[bytes]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def abandon(records: Iterable[Record]) -> None:
    """Ends leases without release, whatever views live: the next consumer gets the records again.

    Never blocks, idempotent.
    """
    for record in records:
        record._abandon()


def lane_name(record: Record) -> str:
    """Returns the name of the segment that holds a record."""
    return record._lane.name


def lane_columns(record: Record) -> Columns:
    """Returns all columns that a record's lane may carry, by name."""
    return record._lane_columns


def lane_memory(record: Record) -> memoryview:
    """Returns the whole segment of a record's lane, read-only, to register with a device.

    It keeps the mapping, and no lease. BufferError in a child of fork.
    """
    return memoryview(record._lane_reader.lane).toreadonly()


def map_lane_writable(record: Record) -> None:
    """Maps the data of a record's lane writable here, for a device that cannot register read-only memory;
    logs it.

    Shown by `inspect`. Never blocks. Raises OSError if the kernel refuses.
    """
    map_data_writable(record._lane_reader.lane, lane_name(record))


@dataclass(frozen=True, slots=True)
class RecordMemory:
    """One record's bytes in its lane, read-only and not copied, and what a lane elsewhere needs beside them.

    Args:
        memory: all of them; the record's lease lasts until its release() and the end of the last view.
        words: rows, columns, index_bytes, group_id_bytes, flags, tokens, group_size: of its slot.
        min_policy_version, max_policy_version: -1 where none was stamped.
        sequence: of the record in its lane.
        t_publish_ns: when it was committed, CLOCK_MONOTONIC of this node.
    """

    memory: memoryview
    words: tuple[int, int, int, int, int, int, int]
    min_policy_version: int
    max_policy_version: int
    sequence: int
    t_publish_ns: int

    def waited_ns(self) -> int:
        """Returns the nanoseconds since its commit, by this node's clock."""
        return time.monotonic_ns() - self.t_publish_ns


def memory_of(record: Record) -> RecordMemory:
    """Returns a record as it is sent. Never blocks; for the record's thread.

    Raises BufferError if its lease has ended.
    """
    return RecordMemory(
        memoryview(record),
        record._slot_words,
        record._min_policy_version,
        record._max_policy_version,
        record._sequence,
        record._t_publish_ns,
    )


def table_of(record: Record) -> bytes:
    """Returns the column table of the record's lane, which is the same for all records of that lane."""
    return record._lane_columns.encode()


log = logging.getLogger(__name__)

_LOG_S = 1.0


class Call(IntEnum):
    """The call that handed a record out. `_ext.lane.LanePoller` sets the first two itself."""

    GET = 0
    POLL = 1
    GET_ASYNC = 2
    FOR = 3
    ASYNC_FOR = 4
    BATCHES = 5
    TAKE_GROUPS = 6
    RANK = 7


_INSTEAD = {
    Call.GET: ("get()", "write `with consumer.get() as record:`, or call record.release() once it is used"),
    Call.POLL: (
        "poll()",
        "write `with record:` for each record of the list, or call record.release() once it is used",
    ),
    Call.GET_ASYNC: (
        "get_async()",
        "write `with await consumer.get_async() as record:`, or call record.release() once it is used",
    ),
    Call.FOR: (
        "`for record in consumer`",
        "call record.release() before a `break`; the next step of the loop releases by itself",
    ),
    Call.ASYNC_FOR: (
        "`async for record in consumer`",
        "call record.release() before a `break`; the next step releases by itself",
    ),
    Call.BATCHES: (
        "batches()",
        "write `with batch:`, or call batch.release() before a `break` and under hold='caller'",
    ),
    Call.TAKE_GROUPS: (
        "take_groups()",
        "call release() on each group's records, or return the groups by put_back()",
    ),
    Call.RANK: (
        "a Rank's batches() or next_share()",
        "write `with batch:` or `with share:`, or call its release() before a `break`",
    ),
}


def say_lost(where: str, number: int, looked_at: bool) -> None:
    """Warns of the first lease dropped without release, by log and ResourceWarning (raised if an error)."""
    call, instead = _INSTEAD[Call(number)]
    if looked_at:
        what = (
            "it stays un-released and keeps its room in the lane: take_back_dropped() hands it out again, "
            "else the next consumer gets it"
        )
    else:
        what = "it was not read: it is handed out again"
    said = f"a record that {call} handed out was dropped without release ({where}); {what} -> {instead}"
    _log_apart(said)
    warnings.warn(said, ResourceWarning, stacklevel=3)


def _log_apart(said: str) -> None:
    """Logs a warning in another thread, and waits a moment for it.

    Interrupts are what leaves records un-released, and before Python 3.13 an interrupt of logging may keep
    its locks for good. A call in this thread could do that to every other thread; and if the program's own
    logging has already done it, this thread must not hang.
    """
    done: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run() -> None:
        log.warning("%s", said)
        done.put(True)

    try:
        start_apart(
            threading.Thread(target=run, name="shmbridge-log", daemon=True), lambda _: done.put(False)
        )
        logged = done.get(timeout=_LOG_S)
    except queue.Empty:
        return
    except RuntimeError:  # not even the starting thread can be had
        logged = False
    if not logged:
        log.warning("%s", said)


log = logging.getLogger(__name__)


def hand_out(groups: Iterable[Group], call: Call, *, looked_at: bool) -> None:
    """Notes which call handed out the groups' records, and whether the records count as looked at."""
    for group in groups:
        for record in group.records:
            record._handed_out_by, record._looked_at = call, looked_at


def log_contradictions(assembler: GroupAssembler) -> None:
    """Logs the groups whose fragments were found to contradict each other since the last call."""
    while assembler.contradictory:
        group = assembler.contradictory.pop()
        log.error(
            "group %s of %s will be discarded: %s -> one group_size= for all fragments of a group",
            group.group_id,
            group.producer_id,
            group.wrong,
        )


CHECK_VARIABLE = "SHMBRIDGE_CHECK_ROWS"
DEFAULT_EVERY = 32


def checked_every() -> int:
    """Returns the interval of rows that carry checks: 1 for every row, 0 for none.

    Set by SHMBRIDGE_CHECK_ROWS. Never blocks; ValueError if that is not such a number.
    """
    said = os.environ.get(CHECK_VARIABLE, "").strip()
    if not said:
        return DEFAULT_EVERY
    if not said.isascii() or not said.isdigit() or int(said) >= 1 << 32:
        raise ValueError(
            f"{CHECK_VARIABLE}={said!r} is not a number of rows -> 1 checks every row, "
            f"{DEFAULT_EVERY} one in {DEFAULT_EVERY}, 0 none"
        )
    return int(said)


def new_sampler() -> RowSampler:
    """Returns a sampler of the rows of a new producer that carry checks."""
    return RowSampler(checked_every(), time.monotonic_ns())
