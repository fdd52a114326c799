"""`shmbridge tail`: the records of a bridge as they come, read without consuming any."""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from shmbridge.parser import Parser, bridge_name

if TYPE_CHECKING:
    from shmbridge.record.record import Record
    from shmbridge.watch.observer import Observer

HELP = "print the records of a bridge as they come; takes none away"
EXAMPLES = """examples:
  shmbridge tail run1                       a line per record: what is held, then what comes
  shmbridge tail run1 --env gsm8k --new     only that environment, only what comes from now on
  shmbridge tail run1 --rows -n 3           three records, a line per row
  shmbridge tail run1 --decode Qwen/Qwen3-8B    completions as text, with their step rewards
  shmbridge tail run1 --json | jq .group_id     one JSON object per record

It holds nothing back: records that were released before they could be copied are counted, on standard error.

exit codes: 0 shown; 3 no such bridge; 130 ended by Ctrl-C"""
_LOOK_EVERY_S = 0.5  # whether the bridge is still there


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `tail`."""
    parser.add_argument("bridge", type=bridge_name, metavar="BRIDGE", help="name of the bridge")
    parser.add_argument("--env", metavar="NAME", help="only records of this environment")
    parser.add_argument("-n", type=int, metavar="N", help="end after N records")
    parser.add_argument("--new", action="store_true", help="only records committed from now on")
    parser.add_argument("--no-follow", action="store_true", help="end once everything there is was shown")
    parser.add_argument("--rows", action="store_true", help="a line per row, too")
    parser.add_argument(
        "--decode",
        metavar="TOKENIZER",
        help="completions as text: a tokenizer.json, its folder, or a locally cached name; implies --rows",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints records until N were shown, the bridge is gone, or Ctrl-C."""
    from shmbridge.segments.segment import bridges
    from shmbridge.watch.observer import Observer

    show = _lines(arguments)
    with Observer(arguments.bridge, backlog=not arguments.new) as observer:
        if arguments.bridge not in bridges():
            print(f"no bridge {arguments.bridge!r}", file=sys.stderr)
            return 3
        try:
            for record in itertools.islice(_records(observer, arguments), arguments.n):
                print("\n".join(show(record)), flush=True)
        except BrokenPipeError:  # `| head`: nobody reads on, not even what the interpreter flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _records(observer: "Observer", arguments: argparse.Namespace) -> "Iterator[Record]":
    """Yields the wanted records; says on standard error how many were missed."""
    from shmbridge.segments.segment import bridges

    missed = 0
    while True:
        for record in observer.poll():
            if arguments.env in (None, record.meta.env_name):
                yield record
        if observer.missed > missed:
            missed = observer.missed
            print(f"{missed} records were released before they could be shown", file=sys.stderr)
        if not observer.wait(0 if arguments.no_follow else _LOOK_EVERY_S) and (
            arguments.no_follow or arguments.bridge not in bridges()
        ):
            return


def _lines(arguments: argparse.Namespace) -> "Callable[[Record], list[str]]":
    """How a record is shown."""
    from shmbridge.watch.decode import tokenizer_pieces
    from shmbridge.watch.record_lines import facts_of, line_of, rows_of
    from shmbridge.watch.snapshot import policy_version

    if arguments.json:
        return lambda record: [msgspec.json.encode(facts_of(record)).decode()]
    pieces = tokenizer_pieces(arguments.decode) if arguments.decode else None
    with_rows = arguments.rows or pieces is not None

    def lines(record: "Record") -> list[str]:
        return [
            line_of(record, policy_version(arguments.bridge)),
            *(rows_of(record, pieces) if with_rows else ()),
        ]

    return lines
