"""`shmbridge record`: writes the records of a running bridge into files, from outside."""

import argparse
import json
import signal
from dataclasses import asdict
from pathlib import Path

from shmbridge.parser import Parser, amount, bridge_name, whole
from shmbridge.program import refuse

HELP = "write the records of a bridge into Parquet or Arrow files; slows nobody, says what it missed"
EXAMPLES = """examples:
  shmbridge record run1 --out runs/run1/records                 until Ctrl-C
  shmbridge record run1 --out records --limit 1000 --format arrow
  shmbridge record run1 --out records --seconds 60 --json

It watches from outside: a record that is released before it was copied is counted as missed. A recording that
misses nothing is made inside the learner: python -m shmbridge.consumers.grpo --record DIR.

exit codes: 0 ended by a signal, --limit or --seconds; 1 an error, such as a full disk"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `record`."""
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


def run(arguments: argparse.Namespace) -> int:
    """Records until it is stopped; prints what was recorded and what was missed."""
    from shmbridge.archive.observing import observe
    from shmbridge.archive.recorder import Recorder
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
