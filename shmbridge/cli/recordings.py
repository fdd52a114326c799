"""`shmbridge record`, `replay` and `export`: the records of a bridge in files."""

import argparse
import json
import signal
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Literal

from shmbridge.cli.base import Command, Parser, amount, bridge_name, refuse, whole


def _record_arguments(parser: Parser) -> None:
    parser.add_argument(
        "bridge", type=bridge_name, metavar="BRIDGE", help="name of the bridge; it may begin later"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the files")
    parser.add_argument(
        "--format", choices=("parquet", "arrow"), default="parquet", help="of finished parts (%(default)s)"
    )
    parser.add_argument("--limit", type=whole(1), metavar="N", help="end after N records")
    parser.add_argument("--seconds", type=amount, metavar="S", help="end after S seconds")
    parser.add_argument(
        "--rotate-bytes", default="256M", metavar="SIZE", help="finish a part of this size (%(default)s)"
    )
    parser.add_argument(
        "--rotate-seconds", type=amount, default=60.0, metavar="S", help="or of this age (%(default)g)"
    )
    parser.add_argument(
        "--on-full-disk",
        choices=("stop", "skip"),
        default="stop",
        help="end with an error, or stop recording and count (%(default)s)",
    )
    parser.add_argument("--fsync", action="store_true", help="wait for the disk at every message")


def _record(arguments: argparse.Namespace) -> int:
    """Records until it is stopped; prints what was recorded and what was missed."""
    from shmbridge.archive.recorder import Recorder, observe
    from shmbridge.watch.text import printable

    signals: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        recorder = Recorder(
            arguments.out,
            format=arguments.format,
            rotate_bytes=arguments.rotate_bytes,
            rotate_seconds=arguments.rotate_seconds,
            on_full_disk=arguments.on_full_disk,
            fsync=arguments.fsync,
        )
        done = observe(
            arguments.bridge,
            recorder,
            limit=arguments.limit,
            seconds=arguments.seconds,
            stopped=lambda: bool(signals),
        )
    except (OSError, ValueError) as wrong:
        refuse("shmbridge record", wrong)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arguments.json:
        print(json.dumps(asdict(done)))  # escapes what a path has that is not UTF-8
        return 0
    print(
        f"{done.recorded} records in {printable(str(arguments.out))}; {done.missed} missed, "
        f"{done.skipped} skipped, {done.unreadable} unreadable, {done.again} there already"
    )
    for producer_id, sequence in done.reached.items():
        print(f"  {printable(producer_id)} up to sequence {sequence}")
    if done.missed_lanes:
        print(f"  {done.missed_lanes} lanes came and went unseen, with an unknown count of records")
    for lane, why in done.unreadable_lanes.items():
        print(f"  lane {lane} is not recorded: {printable(why)}")
    return 0


RECORD = Command(
    "write the records of a bridge into Parquet or Arrow files; slows no process, counts what it missed",
    """examples:
  shmbridge record run1 --out runs/run1/records                 until Ctrl-C
  shmbridge record run1 --out records --limit 1000 --format arrow
  shmbridge record run1 --out records --seconds 60 --json

It watches from outside: a record that is released before it was copied is counted as missed. A recording that
misses nothing is made inside the learner: python -m shmbridge.consumers.grpo --record DIR.

exit codes: 0 ended by a signal, --limit or --seconds; 1 an error, such as a full disk""",
    _record_arguments,
    _record,
)


def _replay_arguments(parser: Parser) -> None:
    import_module("shmbridge.producers.replay").prepare_parser(parser)


def _replay(arguments: argparse.Namespace) -> int:
    """Replays the folder."""
    done: int = import_module("shmbridge.producers.replay").run(arguments, "shmbridge replay")
    return done


REPLAY = Command(
    "put a recorded folder into a bridge again, bit by bit, in the recorded order",
    """examples:
  shmbridge replay runs/run1/records --bridge run2                 at the recorded pace
  shmbridge replay runs/run1/records --bridge run2 --speed 2.0     twice as fast
  shmbridge replay runs/run1/records --bridge run2 --speed max     as fast as the learner takes

One producer for each recorded one. With several it waits for the hub between lanes, so that the hub hands out
in the recorded order; --any-order does not.

exit codes: 0 all is put; 1 no archive, or a wait was longer than --timeout; 130 Ctrl-C""",
    _replay_arguments,
    _replay,
)


def _export_arguments(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that a recorder wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="copy everything into this one file")
    parser.add_argument(
        "--format",
        choices=("parquet", "arrow"),
        help="of what is written (by the ending of --out, else parquet)",
    )


def _export(arguments: argparse.Namespace) -> int:
    """Finishes or copies; prints the key that each lane reached."""
    from shmbridge.archive.folder import copy_folder, finish_folder
    from shmbridge.watch.text import printable

    is_arrow = arguments.out is not None and arguments.out.suffix == ".arrow"
    kind: Literal["parquet", "arrow"] = arguments.format or ("arrow" if is_arrow else "parquet")
    try:
        done = (
            finish_folder(arguments.folder, kind)
            if arguments.out is None
            else copy_folder(arguments.folder, arguments.out, kind)
        )
    except OSError as wrong:
        refuse("shmbridge export", wrong)
        return 1
    if arguments.json:
        print(json.dumps(asdict(done)))  # escapes what a path has that is not UTF-8
        return 0
    print(f"{done.records} records" + (f", {done.rows} rows in {printable(done.out)}" if done.out else ""))
    for producer_id, sequence in done.reached.items():
        print(f"  {printable(producer_id)}: {done.counts[producer_id]} records, up to sequence {sequence}")
    for path in done.finished:
        print(f"  finished {printable(path)}")
    return 0


EXPORT = Command(
    "finish what a killed recorder left in a folder, or copy a folder into one Parquet or Arrow file",
    """examples:
  shmbridge export runs/run1/records                        finish its parts, show what it holds
  shmbridge export runs/run1/records --out run1.parquet     one file, every record once
  shmbridge export runs/run1/records --out run1.arrow       an Arrow IPC file

exit codes: 0 done; 1 no archive, a recorder is at work (without --out), or the disk failed""",
    _export_arguments,
    _export,
)
