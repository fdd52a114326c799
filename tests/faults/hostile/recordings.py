"""Good recordings in every format, what they hold to the bit, and a child that reads what became of them."""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import shmbridge
from shmbridge.archive.folder import ArchivedRecord, read_archive
from shmbridge.archive.recorder import Recorder
from shmbridge.put import FlatColumn
from shmbridge.schema import Tag

KINDS = ("parquet", "arrow", "arrows")
SCHEMA = pa.schema(
    [
        ("own_bits", pa.list_(pa.bool_())),
        ("own_half", pa.float16()),
        ("own_raw", pa.binary()),
        ("own_big", pa.list_(pa.uint64())),
        ("own_names", pa.map_(pa.utf8(), pa.float32())),
    ]
)
_MEMORY, _PATIENCE_S = 6 << 30, 60
_HALF_A_MESSAGE = bytes(8) + b"what a killed recorder was about to write" * 3


def groups() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Groups of every kind of column, and how they are put; together more than a block of a file."""
    random = np.random.default_rng(17)
    tokens = [random.integers(0, 1 << 30, count).astype(np.int32) for count in (9_000, 11_000)]
    long = {
        "tokens": tokens,
        "loss_mask": [(row % 2).astype(np.uint8) for row in tokens],
        "inference_logprobs": [-random.random(len(row)).astype(np.float32) for row in tokens],
    }
    rich = {
        "tokens": [[1, 2, 3], [4, 5]],
        "loss_mask": [[0, 1, 1], [0, 1]],
        "score": [1.0, -0.0],
        "advantages": [[0.5, 1.0, 1.5], [2.0, 2.5]],
        "step_rewards": [[0.5], [1.0, 2.0]],
        "step_ends": [[3], [1, 2]],
        "distill_token_ids": [[[1, 2], [3], []], [[4], [5, 6, 7]]],
        "reward_components": [{"a": 1.0, "größe": 2.0}, {}],
        "instance_id": ["one", "zwei ü"],
        "is_last": [True, False],
        "messages": [[{"role": "user", "content": "x"}], None],
        "group_overrides": {"k": 1},
        "images": None,
        "own_bits": [[True, False, True], []],
        "own_half": [0.5, 2.0],
        "own_raw": [b"\x00\xff", b""],
        "own_big": [[1 << 63], [0, 1]],
        "own_names": [{"x": 0.25}, {"y": 1.0, "z": 2.0}],
    }
    uneven = {
        "tokens": [[1, 2, 3], [4, 5]],
        "scores": [1.0, 2.0, 3.0],
        "advantages": [[0.5], [0.25, -0.0], [1.0]],
        "messages": [[{"role": "user", "content": "a"}], None, None],
        "distill_token_ids": [[[1], [2, 3]]],
        "reward_components": [{"a": 1.0}, {"b": 2.0, "c": 3.0}, {}],
    }
    return [
        (long, {"group_id": "long", "policy_version": 3}),
        (rich, {"group_id": "rich"}),
        (uneven, {"group_id": "uneven", "foreign": True}),
        ({"tokens": [[7]]}, {"group_id": "last", "split": "eval"}),
    ]


def make(folder: Path, bridge: str) -> dict[str, Path]:
    """Returns a part of each format, the same records in each, alone in a folder of its own."""
    with (
        shmbridge.Consumer(bridge, schema=SCHEMA) as consumer,
        shmbridge.Producer(bridge, "env", "8M", schema=SCHEMA, producer_id="p") as producer,
    ):
        for group, options in groups():
            producer.put(group, **options)
        records = consumer.poll()
        for kind in ("parquet", "arrow"):
            with Recorder(folder / kind, format=kind, schema=SCHEMA) as recorder:
                for record in records:
                    recorder.take([record])
        killed = Recorder(folder / "killed", schema=SCHEMA)
        for record in records:
            killed.take([record])
            record.release()
        del records, record
        (folder / "arrows").mkdir()
        stream = folder / "arrows" / "part-000000.arrows"
        shutil.copy(folder / "killed" / stream.name, stream)
        with stream.open("ab") as file:
            file.write(_HALF_A_MESSAGE)
        killed.close()
    return {kind: folder / kind / f"part-000000.{kind}" for kind in KINDS}


def contents(folder: Path) -> list[Any]:
    """What a folder holds, to the bit."""
    return [content(record) for record in read_archive(folder)]


def content(record: ArchivedRecord) -> Any:
    """What one record holds: all that it says of itself, and its columns."""
    said = {name: getattr(record, name) for name in ArchivedRecord.__slots__ if name != "group"}
    group = record.group
    columns = {name: bits(column) for name, column in group.values.items()}
    return said, group.env_id, group.uneven, group.columns.encode(), columns


def bits(column: FlatColumn | Tag) -> Any:
    """A column, to the bit."""
    if isinstance(column, Tag):
        return column
    parts = [column.values, column.lengths, column.inner, column.valid]
    raw = [None if part is None else np.ascontiguousarray(part).tobytes() for part in parts]
    return (column.entries, str(column.values.dtype), *raw, column.keys)


def survived(jobs: Sequence[Callable[[], str]]) -> list[str]:
    """Returns what each job says, in one line. They run in a child, which goes on behind one that ends it."""
    said: list[str] = []
    while len(said) < len(jobs):
        reads, writes = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
                for job in jobs[len(said) :]:
                    signal.alarm(_PATIENCE_S)
                    os.write(writes, job().replace("\n", " ")[:500].encode(errors="replace") + b"\n")
            finally:
                os._exit(0)
        os.close(writes)
        with os.fdopen(reads, "rb") as answers:
            said += answers.read().decode(errors="replace").splitlines()
        status = os.waitpid(pid, 0)[1]
        if len(said) < len(jobs):
            said.append(f"ended the process: {os.waitstatus_to_exitcode(status)}")
    return said
