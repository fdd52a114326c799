"""Fuzzes what reads recordings and parcels, down to the lane: an error with a code, or records for a hub.

    python fuzz_decoder.py --seconds 60 --seed 1                  flips, sizes, copies, cuts, splices
    python fuzz_decoder.py --atheris -max_total_time=60 corpus    guided by coverage, with Atheris
    python fuzz_decoder.py FILE                                   one input again

An input is a byte that says what it is, and its bytes. Checksums do not stop the fuzzer: parts of revision 1
have none, and those of parcels are made right. Those of later parts are fuzzed as they are, too.
"""

import argparse
import gzip
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[3]))
import shmbridge
from shmbridge.archive import folder, format
from shmbridge.archive.recorder import flat_record
from shmbridge.put import LaneOrigin, RelayedRecord
from shmbridge.record import memory_of, table_of
from shmbridge.relay import wire
from tests.faults.hostile import recordings
from tests.faults.hostile.lies import lies_in_odd

EARLIER = Path(__file__).parents[2] / "transport/archive/revision_1"
FORMATS = ("parquet", "arrow", "arrows")
KINDS = (*(f"{kind} of revision 1" for kind in FORMATS), *FORMATS, "record_odd", "parcel")
ODD, PARCEL = KINDS.index("record_odd"), KINDS.index("parcel")
TYPED = (
    shmbridge.ArchiveUnreadable,
    shmbridge.InvalidRecord,
    shmbridge.SchemaMismatch,
    shmbridge.RecordTooBig,
    shmbridge.LayoutMismatch,
    shmbridge.BadArgument,  # a producer's id that no lane can carry
)
BOUNDARIES = [0, 1, 7, 0x7FFF, 0x8000, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32]
BOUNDARIES += [(1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 4]
MEMORY = 4 << 30
GUIDED = "--atheris" in sys.argv


class Target:
    """A bridge into which everything is put, and a folder for parts."""

    def __init__(self, folder: Path, inputs: list[bytes]) -> None:
        self.name, self.part = f"fuzz-{os.getpid()}", folder
        self.consumer = shmbridge.Consumer(self.name, schema=recordings.SCHEMA)
        options: dict[str, Any] = {"schema": recordings.SCHEMA, "on_full": "raise"}
        self.producer = shmbridge.Producer(self.name, "env", "1M", **options)
        self.origin = LaneOrigin("env-1", "p-0123456789abcdef")
        self.relay = shmbridge.Producer(self.name, "env", "1M", origin=self.origin, **options)
        self.layout = format.Layout(self.producer.columns)
        wire._check_of = lambda record: 0  # else no changed record would come through
        self.wanted: dict[int, list[Any]] = {}  # what parts with checksums hold
        for kind, raw in enumerate(inputs[: len(FORMATS) * 2]):
            if kind >= len(FORMATS):
                (path := folder / f"part-000000.{KINDS[kind]}").write_bytes(raw[1:])
                self.wanted[kind] = recordings.contents(folder)
                path.unlink()
        self.outcomes: Counter[str] = Counter()

    def close(self) -> None:
        self.relay.close_origin()
        for end in (self.producer, self.relay, self.consumer):
            end.close()
        shmbridge.clean(self.name, dry_run=False)

    def run(self, data: bytes) -> None:
        """Reads an input and puts what it holds. Raises for a finding."""
        if not data:
            return
        kind, raw = data[0] % len(KINDS), data[1:]
        read = {ODD: self._odd, PARCEL: self._parcel}.get(kind, lambda raw: self._archive(raw, kind))
        try:
            read(raw)
            outcome = "read"
        except TYPED as wrong:
            outcome = type(wrong).__name__
        self.outcomes[f"{KINDS[kind]}: {outcome}"] += 1
        self._taken()

    def _archive(self, raw: bytes, kind: int) -> None:
        path = self.part / f"part-000000.{FORMATS[kind % len(FORMATS)]}"
        path.write_bytes(raw)
        wanted = self.wanted.get(kind)
        try:
            for number, record in enumerate(folder.read_archive(self.part)):
                if wanted is not None:
                    assert recordings.content(record) == wanted[number], "a record has changed"
                versions = record.min_policy_version, record.max_policy_version
                self.producer.put(
                    record.group, group_id=record.group_id, group_size=record.rows, policy_version=versions
                )
                self._taken()
        finally:
            path.unlink()

    def _odd(self, raw: bytes) -> None:
        said = dict.fromkeys(
            ("advantages", "score", "messages", "distill_token_ids", "reward_components"), "values"
        )
        try:
            arrays = folder._odd(raw, said, self.layout)
        except msgspec.MsgspecError:  # which its caller turns into InvalidRecord
            return
        columns = {name: folder.flat_of(self.layout.columns[name], array) for name, array in arrays.items()}
        tokens = folder.flat_of(self.layout.columns["tokens"], pa.array([[1, 2], [3]], pa.list_(pa.int32())))
        group = folder.RecordedGroup(self.layout.columns, {"tokens": tokens, **columns}, uneven=True)
        self.producer.put(group, group_id="odd")

    def _parcel(self, raw: bytes) -> None:
        try:
            head, *parts = msgspec.msgpack.decode(raw, type=list[bytes])
        except (msgspec.MsgspecError, ValueError):
            return
        head += struct.pack("<Q", wire.checksum([head]))
        for came in wire.decode([np.frombuffer(each, np.uint8) for each in (head, *parts)]).records:
            oldest, newest = came.min_policy_version, came.max_policy_version
            sequence = (
                self.relay._writer.newest_origin if self.relay._writer.newest_origin is not None else -1
            ) + 1
            self.relay.put(
                RelayedRecord(
                    came.extent, came.lane.table, came.words, oldest, newest, sequence, came.waited_ns, 1
                )
            )
            self._taken()

    def _taken(self) -> None:
        for record in self.consumer.poll():
            try:
                with record:
                    flat_record(record)
                    record.to_scored_data()
            except shmbridge.RecordUnreadable:  # text that a relay carried
                record.release()
        assert self.consumer.stats()["lanes_quarantined"] == 0, "a lane of ours was quarantined"


def seeds(folder: Path) -> list[bytes]:
    """Good inputs of each kind."""
    found = [gzip.decompress((EARLIER / f"part-000000.{kind}.gz").read_bytes()) for kind in FORMATS]
    bridge = f"fuzz-seeds-{os.getpid()}"
    found += [path.read_bytes() for path in recordings.make(folder / "parts", bridge).values()]
    inputs = [bytes([kind]) + raw for kind, raw in enumerate(found)]
    for odd in lies_in_odd().values():
        inputs.append(bytes([ODD]) + (odd if isinstance(odd, bytes) else msgspec.msgpack.encode(odd)))
    with (
        shmbridge.Consumer(bridge, schema=recordings.SCHEMA) as consumer,
        shmbridge.Producer(bridge, "env", "8M", schema=recordings.SCHEMA) as producer,
    ):
        for group, options in recordings.groups():
            producer.put(group, **options)
        records, sent = consumer.poll(), []
        lane = wire.SourceLane("p-0123456789abcdef", "env", table_of(records[0]), 1 << 20)
        for record in records:
            memory = memory_of(record)
            extent = np.frombuffer(bytes(memory.memory), np.uint8)
            sent.append(wire.SentRecord(lane, extent, memory.words, memory.sequence, -1, -1, 1))
            record.release()
        del records, record, memory
    shmbridge.clean(bridge, dry_run=False)
    for some in (sent[1:], sent[:1], sent[2:3], []):
        head, *parts = [
            bytes(each) for each in wire.encode(wire.PullReply(wire.State("env-1", "s", 1), some))
        ]
        inputs.append(bytes([PARCEL]) + msgspec.msgpack.encode([head[:-8], *parts]))
    return inputs


def mutated(mixed: random.Random, inputs: list[bytes]) -> bytes:
    """A good input with one to four changes."""
    kind = mixed.randrange(len(KINDS))
    inputs = [each for each in inputs if each[0] == kind]
    raw = bytearray(mixed.choice(inputs))
    for _ in range(mixed.choice((1, 1, 2, 4))):
        if len(raw) < 24:
            break
        at, size = mixed.randrange(1, len(raw)), mixed.choice((1, 4, 8, 64, 512))
        to = mixed.randrange(1, len(raw))
        way = mixed.randrange(8)
        if way < 2:
            raw[at] ^= 1 << mixed.randrange(8)
        elif way < 4:
            width = mixed.choice((2, 4, 8))
            at = (at - 1) // width * width + 1  # the kind's byte stands before
            number = mixed.choice(BOUNDARIES) & ((1 << 8 * width) - 1)
            raw[at : at + width] = number.to_bytes(width, "little")
        elif way == 4:
            raw[to : to + size] = raw[at : at + size]
        elif way == 5:
            raw[to:to] = raw[at : at + size]  # a block twice
        elif way == 6:
            del raw[at : at + size if mixed.random() < 0.7 else len(raw)]
        else:
            other = mixed.choice(inputs)
            raw[at : at + size] = other[at : at + size]
    return bytes(raw)


def fuzz(seconds: float, seed: int) -> int:
    """Mutates in a child, so that its end is a finding as well; returns the number of findings."""
    ends_s, findings, executions = time.monotonic() + seconds, 0, 0
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        inputs, last = seeds(Path(root)), Path(root) / "last"
        while (left_s := ends_s - time.monotonic()) > 0:
            reads, writes = os.pipe()
            if (pid := os.fork()) == 0:
                said = {"executions": 0, "wrong": "", "outcomes": {}}
                try:
                    said = _in_child(Path(root), inputs, last, random.Random(f"{seed} {executions}"), left_s)
                finally:
                    os.write(writes, msgspec.json.encode(said))
                    os._exit(0)
            os.close(writes)
            with os.fdopen(reads, "rb") as answer:
                raw = answer.read()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            shmbridge.clean(f"fuzz-{pid}", dry_run=False)
            said = (
                msgspec.json.decode(raw)
                if raw
                else {"executions": 0, "wrong": f"ended with {code}", "outcomes": {}}
            )
            outcomes.update(said["outcomes"])
            executions += said["executions"] + 1
            if said["wrong"]:
                findings += 1
                kept = Path(f"crash-{seed}-{findings}.bin")
                kept.write_bytes(last.read_bytes())
                print(f"{said['wrong']}\n  input: {kept}", flush=True)
                if findings > 20:
                    break
    for outcome, count in sorted(outcomes.items()):
        print(f"  {count:7} {outcome}")
    print(f"{executions} executions, {findings} findings")
    return findings


def _in_child(
    root: Path, inputs: list[bytes], last: Path, mixed: random.Random, left_s: float
) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    (root / f"{os.getpid()}").mkdir()
    ends_s, executions, wrong = time.monotonic() + left_s, 0, ""
    target = Target(root / f"{os.getpid()}", inputs)
    for data in inputs:
        target.run(data)
    try:
        while time.monotonic() < ends_s and executions < 5_000:
            data = mutated(mixed, inputs)
            last.write_bytes(data)
            signal.alarm(30)
            target.run(data)
            executions += 1
    except BaseException as finding:
        wrong = "".join(traceback.format_exception(finding))
    signal.alarm(0)
    target.close()
    return {"executions": executions, "wrong": wrong, "outcomes": target.outcomes}


def main() -> int:
    if not GUIDED:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("input", nargs="?", type=Path, help="one input to run again")
        parser.add_argument("--seconds", type=float, default=60)
        parser.add_argument("--seed", type=int, default=1)
        arguments = parser.parse_args()
        if arguments.input is None:
            return min(fuzz(arguments.seconds, arguments.seed), 1)
    with tempfile.TemporaryDirectory() as root:
        inputs = seeds(Path(root))
        (Path(root) / "part").mkdir()
        target = Target(Path(root) / "part", inputs)
        if GUIDED:
            import atheris

            atheris.instrument_all()
            sys.argv.remove("--atheris")
            for corpus in [Path(each) for each in sys.argv[1:] if not each.startswith("-")][:1]:
                corpus.mkdir(parents=True, exist_ok=True)
                for number, data in enumerate(inputs):
                    (corpus / f"seed-{number}").write_bytes(data)
            atheris.Setup(sys.argv, target.run)
            atheris.Fuzz()  # ends the process
        target.run(arguments.input.read_bytes())
        print(*target.outcomes)
        target.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
