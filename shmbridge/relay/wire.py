"""The messages of relays: a pull request of the destination, and the reply with the source's records.

A reply is a list of arrays of bytes: a head, which is an Arrow stream of one row a record with its checksum,
and the records as they lay in their lanes, whose checksums are in the head. Nothing is pickled by us; large
records are arrays over the lane's own memory, so that they are copied once, by what sends them.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from shmbridge._ext import header
from shmbridge._ext.weights import checksum
from shmbridge.config import Run
from shmbridge.errors import InvalidRecord, LayoutMismatch
from shmbridge.record.arrow import only_batch

Array = np.ndarray[Any, Any]
Words = tuple[int, int, int, int, int, int, int]

MOST_BYTES = 8 << 20  # of a reply with several records
_JOINED_BELOW = 16 << 10  # smaller records share one array
_LINE = 64

_WORDS = ("rows", "columns", "index_bytes", "group_id_bytes", "flags", "tokens", "group_size")
_OF_RECORD = ("sequence", "min_policy_version", "max_policy_version", "waited_ns")
# Where a record lies: its array among the reply's, and the bytes there.
_PLACE = ("part", "at", "size")
REPLY_SCHEMA = pa.schema(
    [(name, pa.int64()) for name in ("lane", *_WORDS, *_OF_RECORD, *_PLACE)] + [("check", pa.uint64())]
)
_SUM = struct.Struct("<Q")  # of the head, behind it
_LAYOUT, _LANES, _STATE = b"shmbridge.layout", b"shmbridge.lanes", b"shmbridge.state"
_ONE_RELEASE = "run one release of shmbridge on all nodes"


class PullRequest(msgspec.Struct, frozen=True):
    """Pull request: credits and acknowledged sequence per producer.

    Attributes:
        session: of this destination with this source; another one means that un-acknowledged records are sent
            again, from the first.
        number: of the request in its session.
        committed: producer id -> sequence of the last of its records on the learner's node, -1 for none.
        refused: producer id -> (sequence, error code) of records that cannot be put there.
        credits: producer id -> bytes that its lane there has room for; `credit` for any other producer.
        version: the policy version; -1 before the first.
        weights: the newest version of the weights on the learner's node. While those at the source are older,
            its policy version is at most theirs. -1: policy versions do not wait for weights.
        wait_s: longest wait for a record.
        max_staleness: staler records are discarded at the source; None: none is.
        run: the run that the learner has announced.
        step: the run's step.
    """

    session: str
    number: int
    committed: dict[str, int]
    refused: dict[str, list[tuple[int, str]]]
    credits: dict[str, int]
    credit: int
    version: int = -1
    paused: bool = False
    draining: bool = False
    max_bytes: int = MOST_BYTES
    wait_s: float = 0.0
    max_staleness: int | None = None
    run: Run | None = None
    step: int = 0
    weights: int = -1


class State(msgspec.Struct):
    """The state of a source, in every reply.

    Attributes:
        node: its name.
        session, number: of the request that it answers.
        idle_ns: how long it waited for records before it answered.
        blocked: whether records wait that no credit was left for.
        backlog: un-released records of its lanes that this session has not sent.
        backlog_lanes: lanes that have such records.
        finished: producers that are asked about or had records here, and are gone with all records released.
        counters: as `Source.stats`.
    """

    node: str
    session: str
    number: int
    pid: int = 0
    idle_ns: int = 0
    blocked: bool = False
    backlog: int = 0
    backlog_lanes: int = 0
    finished: list[str] = []
    counters: dict[str, float] = {}


class SourceLane(msgspec.Struct, frozen=True, array_like=True):
    """What all records of one lane share; `table` is its column table, `lane_bytes` the size of its data."""

    producer_id: str
    env_name: str
    table: bytes
    lane_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class SentRecord:
    """One record as its lane held it: `extent` is flat memory, `words` its slot's, in the order of _WORDS."""

    lane: SourceLane
    extent: Array
    words: Words
    sequence: int
    min_policy_version: int
    max_policy_version: int
    waited_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class PullReply:
    """Records of one source, each lane's in their order, and the source's state."""

    state: State
    records: Sequence[SentRecord] = field(default_factory=list)


def encode_request(request: PullRequest) -> bytes:
    """Returns the bytes of a request, which another node decodes."""
    return msgspec.msgpack.encode(request)


def decode_request(raw: bytes) -> PullRequest:
    """Returns a request. Raises InvalidRecord for anything else."""
    try:
        return msgspec.msgpack.decode(raw, type=PullRequest)
    except msgspec.MsgspecError as wrong:
        raise InvalidRecord(f"not a pull request of a relay: {wrong}", hint=_ONE_RELEASE) from None


def encode(reply: PullReply, layout_version: int = header.layout_version) -> list[Array]:
    """Returns a reply as arrays of bytes: the head, small records joined, and each other record in place.

    The arrays over lanes keep their leases while they live.
    """
    lanes = {record.lane.producer_id: record.lane for record in reply.records}
    number = {producer_id: at for at, producer_id in enumerate(lanes)}
    small = _joined([record for record in reply.records if len(record.extent) < _JOINED_BELOW])
    parts, rows, used = [small] if len(small) else [], [], 0
    for record in reply.records:
        size = len(record.extent)
        if size < _JOINED_BELOW:
            place = (0, used, size)
            used += _lines(size)
        else:
            place = (len(parts), 0, size)
            parts.append(record.extent)
        own = (record.sequence, record.min_policy_version, record.max_policy_version, record.waited_ns)
        rows.append((number[record.lane.producer_id], *record.words, *own, *place, _check_of(record)))
    columns = zip(*rows, strict=True) if rows else [()] * len(REPLY_SCHEMA)
    metadata = {
        _LAYOUT: str(layout_version).encode(),
        _LANES: msgspec.json.encode(list(lanes.values())),
        _STATE: msgspec.json.encode(reply.state),
    }
    schema = REPLY_SCHEMA.with_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        arrays = [pa.array(column, each.type) for column, each in zip(columns, REPLY_SCHEMA, strict=True)]
        stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    head = sink.getvalue().to_pybytes()
    return [np.frombuffer(head + _SUM.pack(checksum([head])), np.uint8), *parts]


def decode(arrays: Sequence[Array]) -> PullReply:
    """Returns a reply, its records over the given arrays; all of them are as they were sent.

    Raises:
        LayoutMismatch: its node has another layout of lanes.
        InvalidRecord: it is not a reply, or not as it was sent.
    """
    try:
        whole, *parts = [np.frombuffer(each, np.uint8) for each in arrays]
        head = whole[: -_SUM.size]
        if whole[-_SUM.size :].tobytes() != _SUM.pack(checksum([head])):
            raise ValueError("its head is not what was sent")
        metadata = pa.ipc.read_schema(pa.py_buffer(head)).metadata or {}
        theirs = int(metadata[_LAYOUT])
        if theirs != header.layout_version:
            raise LayoutMismatch(
                f"a relay sends records of layout {theirs}, and this node has {header.layout_version}",
                hint=_ONE_RELEASE,
            )
        state = msgspec.json.decode(metadata[_STATE], type=State)
        lanes = msgspec.json.decode(metadata[_LANES], type=list[SourceLane])
        batch = only_batch(pa.py_buffer(head), {each.name: each.type for each in REPLY_SCHEMA})
        if batch.schema.names != REPLY_SCHEMA.names:
            raise ValueError(f"its columns are {batch.schema.names}")
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        return PullReply(state, [_record(row, lanes, parts) for row in rows])
    except LayoutMismatch:
        raise
    except (
        pa.ArrowException,
        OSError,
        msgspec.MsgspecError,
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        BufferError,
        RecursionError,
    ) as wrong:
        why = wrong.message if isinstance(wrong, InvalidRecord) else wrong
        raise InvalidRecord(f"not a reply of a relay: {why}", hint=_ONE_RELEASE) from None


def _record(row: tuple[int, ...], lanes: Sequence[SourceLane], parts: Sequence[Array]) -> SentRecord:
    words, own, (part, at, size, check) = row[1:8], row[8:12], row[12:]
    if min(row[0], part, at, size) < 0 or at + size > len(parts[part]):
        raise ValueError(f"a record of {size} bytes at {at} of part {part}")
    record = SentRecord(lanes[row[0]], parts[part][at : at + size], words, *own)  # type: ignore[arg-type]
    if _check_of(record) != check:
        raise ValueError(f"record {record.sequence} of {record.lane.producer_id} is not what was sent")
    return record


def _check_of(record: SentRecord) -> int:
    """Returns the checksum of a record's bytes, as those of that sequence."""
    return checksum([memoryview(record.extent)], record.sequence)  # type: ignore[arg-type]


def _joined(records: Iterable[SentRecord]) -> Array:
    """Returns the bytes of small records, each from the beginning of a cache line."""
    records = list(records)
    joined, at = np.zeros(sum(_lines(len(record.extent)) for record in records), np.uint8), 0
    for record in records:
        joined[at : at + len(record.extent)] = record.extent
        at += _lines(len(record.extent))
    return joined


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE
