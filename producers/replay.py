"""Puts a recorded archive into a bridge again, bit by bit, in the recorded order.

    python -m shmbridge.producers.replay runs/run1/records --bridge run2 --speed max

One producer for each that was recorded, with its name; sequences count from 0 again. A hub of several
lanes takes them in turn, so before the next record is put into another lane, those of the last lane must have
been taken: the hub hands out in the recorded order, and a learner forms the batches that it formed then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import shmbridge
from shmbridge.cli.base import Parser, amount, bridge_name, refuse, size

if TYPE_CHECKING:
    import pyarrow as pa

    from shmbridge.archive.folder import ArchivedRecord
    from shmbridge.schema import Columns

Speed = float | Literal["max"]
_LOOK_S = 0.001
_SLOWEST = 1e-6  # a second takes twelve days; sleep has a limit


@dataclass
class Replayed:
    """What was put: records and rows, and the last recorded sequence of each producer."""

    records: int = 0
    rows: int = 0
    seconds: float = 0.0
    reached: dict[str, int] = field(default_factory=dict)


def replay(
    folder: str,
    bridge: str,
    *,
    speed: Speed = 1.0,
    lane_bytes: int | str = "64M",
    any_order: bool = False,
    timeout_s: float | None = None,
) -> Replayed:
    """Puts every record of a folder, and leaves the lanes to the consumer. Blocks until all are put.

    Args:
        folder: of a recorder.
        bridge: the bridge to put into; not the one that is being recorded.
        speed: 1.0 keeps the recorded gaps, 2.0 halves them, "max" has none.
        lane_bytes: of each lane; a record takes at most half.
        any_order: do not wait until the hub has taken a lane's records before another lane gets one.
        timeout_s: longest wait for room or for the hub; None: for ever.

    Raises:
        ArchiveUnreadable, RecordTooBig, SchemaMismatch, and LaneFull when a wait was too long.
    """
    from shmbridge.archive.folder import counts_of, read_archive

    if timeout_s is not None and not timeout_s >= 0:
        raise shmbridge.BadArgument(f"timeout_s={timeout_s} is no time", hint="give seconds from 0, or none")
    left = counts_of(folder)  # records of each producer that are to be put
    done, began_s = Replayed(), time.monotonic()
    last: shmbridge.Producer | None = None
    with _Lanes(bridge, lane_bytes) as lanes:
        for record, due_s in paced(read_archive(folder), speed):
            producer = lanes.of(record)
            time.sleep(max(began_s + due_s - time.monotonic(), 0.0))
            if last is not None and last is not producer:
                if not any_order:
                    _wait_until_taken(last, timeout_s)
                lanes.close_finished(left)
            try:
                producer.put(
                    record.group,
                    group_id=record.group_id,
                    group_size=record.group_size,
                    policy_version=(record.min_policy_version, record.max_policy_version),
                    split="eval" if record.split == "eval" else "train",
                    timeout_s=timeout_s,
                )
            except shmbridge.InvalidRecord as wrong:
                key = f"record {record.sequence} of {record.producer_id}"
                raise shmbridge.ArchiveUnreadable(
                    f"{key} in {folder} cannot be put: {wrong.message}",
                    hint="take another copy of the folder, or record again",
                ) from wrong
            last = producer
            left[record.producer_id] = left.get(record.producer_id, 1) - 1
            done.records, done.rows = done.records + 1, done.rows + record.rows
            done.reached[record.producer_id] = record.sequence
    done.seconds = time.monotonic() - began_s
    return done


class _Lanes:
    """One producer for each that was recorded, while it has records to put. A context manager."""

    def __init__(self, bridge: str, lane_bytes: int | str) -> None:
        self._bridge, self._lane_bytes = bridge, lane_bytes
        self._producers: dict[str, shmbridge.Producer] = {}

    def of(self, record: ArchivedRecord) -> shmbridge.Producer:
        """Returns the producer of a record; makes its lane. Raises as Producer."""
        producer = self._producers.get(record.producer_id)
        if producer is None:
            producer = self._producers[record.producer_id] = shmbridge.Producer(
                self._bridge,
                record.env_name,
                self._lane_bytes,
                schema=_schema(record.group.columns),
                producer_id=record.producer_id.rpartition("-")[0] or None,
            )
        return producer

    def close_finished(self, left: Mapping[str, int]) -> None:
        """Closes those without records to put: the hub removes their lanes once it has taken all."""
        for producer_id in [each for each in self._producers if left.get(each, 0) <= 0]:
            self._producers.pop(producer_id).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_finished({})


def paced(records: Iterator[ArchivedRecord], speed: Speed) -> Iterator[tuple[ArchivedRecord, float]]:
    """Yields each record with the second at which it is due, from 0, by the gaps between their commits."""
    due_ns, latest_ns, session = 0, 0, None
    for record in records:
        if record.session != session:  # its clock may be another boot's
            session, latest_ns = record.session, record.t_publish_ns
        due_ns += max(record.t_publish_ns - latest_ns, 0)
        latest_ns = max(latest_ns, record.t_publish_ns)
        yield record, 0.0 if speed == "max" else due_ns / 1e9 / speed


def _wait_until_taken(producer: shmbridge.Producer, timeout_s: float | None) -> None:
    began_s = time.monotonic()
    while left := producer.stats()["waiting"]:
        if timeout_s is not None and time.monotonic() - began_s > timeout_s:
            raise shmbridge.LaneFull(
                f"no consumer of bridge {producer.bridge!r} took {left:.0f} records of "
                f"{producer.producer_id} within {timeout_s} s",
                hint="start the consumer, or put in any order: --any-order",
            )
        time.sleep(_LOOK_S)


def _schema(columns: Columns) -> pa.Schema | None:
    import pyarrow as pa

    from shmbridge.schema import STANDARD, arrow_field

    own = [arrow_field(column) for name, column in columns.items() if name not in STANDARD]
    return pa.schema(own) if own else None


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of a replay."""
    parser.add_argument("folder", metavar="DIR", help="folder that a recorder wrote")
    parser.add_argument(
        "--bridge", required=True, type=bridge_name, metavar="NAME", help="bridge to put into"
    )
    parser.add_argument(
        "--speed",
        type=parse_speed,
        default=1.0,
        metavar="original|X|max",
        help="the recorded gaps, those divided by X, or none (original)",
    )
    parser.add_argument(
        "--lane-bytes", type=size, default="64M", metavar="SIZE", help="memory of each lane (%(default)s)"
    )
    parser.add_argument(
        "--any-order",
        action="store_true",
        help="do not wait for the hub between lanes: it may hand out in another order than the recorded one",
    )
    parser.add_argument(
        "--timeout", type=amount, metavar="S", help="longest wait for room or for the hub (no limit)"
    )


def parse_speed(text: str) -> Speed:
    """Returns `original` as 1.0, `max`, or a number above 0; for argparse's `type`."""
    if text == "max":
        return "max"
    try:
        speed = 1.0 if text == "original" else float(text)
    except ValueError:
        speed = 0.0
    if not _SLOWEST <= speed < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not original, max, or a number above 0, from {_SLOWEST} on"
        )
    return speed


def run(arguments: argparse.Namespace, prog: str) -> int:
    """Replays as the parsed arguments say; prints what was put; returns the exit code."""
    try:
        done = replay(
            arguments.folder,
            arguments.bridge,
            speed=arguments.speed,
            lane_bytes=arguments.lane_bytes,
            any_order=arguments.any_order,
            timeout_s=arguments.timeout,
        )
    except (shmbridge.ShmBridgeError, ValueError, OSError) as error:
        refuse(prog, error)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print(json.dumps(vars(done)))
    else:
        print(f"{done.records} records, {done.rows} trajectories in {done.seconds:.1f} s")
        for producer_id, sequence in done.reached.items():
            print(f"  {producer_id} up to sequence {sequence}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Replays as a command line says; returns the exit code."""
    prog = "python -m shmbridge.producers.replay"
    parser = Parser(prog, description="Put a recorded folder into a bridge again.")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    prepare_parser(parser)
    return run(parser.parse_args(argv), prog)


if __name__ == "__main__":
    raise SystemExit(main())
