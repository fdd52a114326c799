"""`shmbridge tail`: the records of a bridge as they come, read without consuming any."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from shmbridge.parser import Parser, bridge_name, whole

if TYPE_CHECKING:
    from shmbridge.record import Record
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
_FIRST, _NEXT = 64, 256  # records that are copied at a time


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `tail`."""
    parser.add_argument("bridge", type=bridge_name, metavar="BRIDGE", help="name of the bridge")
    parser.add_argument("--env", metavar="NAME", help="only records of this environment")
    parser.add_argument("-n", type=whole(0), metavar="N", help="end after N records")
    parser.add_argument("--new", action="store_true", help="only records committed from now on")
    parser.add_argument("--no-follow", action="store_true", help="end once everything there is was shown")
    parser.add_argument("--rows", action="store_true", help="a line per row, too")
    parser.add_argument(
        "--decode",
        metavar="TOKENIZER",
        help="completions as text: a tokenizer.json, its folder, or a locally cached name; implies --rows",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints records until N were shown, the bridge is gone, nobody reads on, or Ctrl-C."""
    from shmbridge.watch.observer import Observer
    from shmbridge.watch.output import to_reader

    show = _lines(arguments)
    follow = not arguments.no_follow
    with Observer(arguments.bridge, backlog=not arguments.new, follow=follow) as observer, to_reader():
        for record in itertools.islice(_records(observer, arguments), arguments.n):
            print("\n".join(show(record)), flush=True)
    return 0


def _records(observer: "Observer", arguments: argparse.Namespace) -> "Iterator[Record]":
    """Yields the wanted records; says on standard error what cannot be shown."""
    from shmbridge.segments import bridge_names
    from shmbridge.watch.long_wait import LongWait
    from shmbridge.watch.output import has_reader
    from shmbridge.watch.spare_cpu import give_way
    from shmbridge.watch.text import printable

    said: set[str] = set()
    most, nothing_since, long_wait = _FIRST, time.monotonic(), LongWait(arguments.bridge)
    if arguments.env is not None and arguments.env not in observer.environments:
        there = ", ".join(sorted(map(printable, observer.environments))) or "none"
        print(f"no lane of environment {arguments.env!r} yet; there are: {there}", file=sys.stderr)
    while True:
        records = observer.poll(most)
        for record in records:
            nothing_since = time.monotonic()
            if arguments.env in (None, record.meta.env_name):
                yield record
        if most == _FIRST and not (arguments.no_follow and len(records) < most):
            most = _NEXT
            give_way()  # the first screen is there: from now on the run goes first
        for sentence in _not_shown(observer):
            if sentence not in said:
                said.add(sentence)
                print(sentence, file=sys.stderr)
        if not observer.wait(0 if arguments.no_follow else _LOOK_EVERY_S) and (
            arguments.no_follow or arguments.bridge not in bridge_names() or not has_reader()
        ):
            return
        long_wait.look(nothing_since)


def _not_shown(observer: "Observer") -> "Iterator[str]":
    from shmbridge.errors import counted
    from shmbridge.watch.text import printable

    if observer.missed:
        were = "was" if observer.missed == 1 else "were"
        yield f"{counted(observer.missed, 'record')} {were} released before they could be shown"
    if observer.missed_lanes:
        lanes = counted(observer.missed_lanes, "lane")
        yield f"{lanes} came and went unseen, with an unknown count of records"
    for name, why in observer.unreadable.items():
        yield f"lane {name} cannot be read: {printable(why)}"


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
