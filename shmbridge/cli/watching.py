"""`shmbridge top` and `shmbridge tail`: a bridge live, and its records as they come."""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from shmbridge.cli.base import Command, Parser, bridge_name, install, refuse, report_none, whole
from shmbridge.config import parse_duration
from shmbridge.segments import bridge_names

if TYPE_CHECKING:
    from shmbridge.record import Record
    from shmbridge.watch.observer import Observer


def _top_arguments(parser: Parser) -> None:
    parser.add_argument(
        "bridge",
        nargs="?",
        type=bridge_name,
        metavar="BRIDGE",
        help="one bridge; default: the only one, or one to choose",
    )
    parser.add_argument(
        "--cluster", action="store_true", help="show the relays that feed it from other nodes"
    )
    parser.add_argument(
        "--address", default="auto", metavar="HOST:PORT", help="of the Ray cluster (that of this machine)"
    )
    parser.add_argument("--once", action="store_true", help="print one screen and end")
    parser.add_argument(
        "--interval", type=parse_duration, default=1.0, help="time between two looks: 1s, 500ms (1s)"
    )
    parser.add_argument(
        "--decode", metavar="TOKENIZER", help="show records as text: a local name, file or folder"
    )


def _top(arguments: argparse.Namespace) -> int:
    """Shows the bridge until the user quits, or once."""
    from shmbridge.cli.base import to_reader

    if arguments.cluster:
        return _cluster(arguments)
    wanted = [name for name in bridge_names() if arguments.bridge in (None, name)]
    if not wanted:
        if not arguments.json:
            report_none("shmbridge top", arguments.bridge)
        return 3 if arguments.bridge else 0
    if arguments.json or arguments.once or not _is_terminal():
        with to_reader():
            (_json if arguments.json else _once)(wanted, arguments.interval, arguments.once)
        return 0
    return _live(wanted[0] if len(wanted) == 1 else None, arguments.interval, arguments.decode)


def _cluster(arguments: argparse.Namespace) -> int:
    """Shows the relays until the user ends it, or once."""
    from shmbridge.cli.base import require

    require("ray")
    from shmbridge.relay.ray import place
    from shmbridge.relay.ray.directory import table

    if arguments.bridge is None:
        refuse("shmbridge top", "--cluster shows one bridge", "shmbridge top NAME --cluster")
        return 2
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), place.joined(arguments.address):
        before = place.report(arguments.bridge)
        while before is not None:
            time.sleep(arguments.interval)
            now = place.report(arguments.bridge)
            if now is None:
                break
            text = (
                msgspec.json.encode(now).decode() if arguments.json
                else table(now, before, arguments.interval) + ("" if arguments.once else "\n")
            )  # fmt: skip
            print(text, file=out, flush=True)
            if arguments.once:
                return 0
            before = now
    print(f"shmbridge top: no relay of bridge {arguments.bridge!r} answers", file=sys.stderr)
    return 1


def _is_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _live(bridge: str | None, interval_s: float, tokenizer: str | None) -> int:
    try:
        from shmbridge.watch.text import tokenizer_pieces
        from shmbridge.watch.top import Top
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("textual", "rich"):
            raise
        refuse("shmbridge top", "textual is not installed", f"{install('tui')}, or --once")
        return 1
    pieces = None if tokenizer is None else tokenizer_pieces(tokenizer)
    view = Top(bridge, interval_s=interval_s, pieces=pieces)
    view.run()
    return view.return_code or 0


def _once(names: list[str], interval_s: float, _: bool) -> None:
    from shmbridge.segments import list_bridges
    from shmbridge.watch.snapshot import look
    from shmbridge.watch.text import block

    before = {name: look(name) for name in names}
    time.sleep(interval_s)
    blocks = [
        block(info, before[info.name], every_lane=False) for info in list_bridges() if info.name in names
    ]
    print("\n\n".join(blocks))


def _json(names: list[str], interval_s: float, once: bool) -> None:
    from shmbridge.watch.snapshot import look
    from shmbridge.watch.text import of_look

    before = {name: look(name) for name in names}
    while any(before.values()):
        time.sleep(interval_s)
        for name in names:
            now = look(name)
            if now is not None:
                print(msgspec.json.encode(of_look(now, before[name])).decode(), flush=True)
            before[name] = now
        if once:
            break


TOP = Command(
    "watch a bridge live: what is wrong, the consumer, every lane, its newest record",
    """examples:
  shmbridge top                   the only bridge, or one to choose
  shmbridge top run1              keys: q quit, p pause, s sort, g group, / filter, Enter record, ? help
  shmbridge top run1 --decode Qwen/Qwen3-0.6B    records as text; a local tokenizer, or a tokenizer.json
  shmbridge top run1 --once       one plain screen, as inspect; also where there is no terminal
  shmbridge top run1 --json       a JSON line per interval; with --once, one

  shmbridge top run1 --cluster    the relays of a Ray cluster, one line a node; with --once, once

The live view needs textual: pip install "shmbridge[tui]". --once and --json do not.

exit codes: 0 shown; 1 the live view cannot run here, no relay answers; 2 wrong arguments;
3 no such bridge""",
    _top_arguments,
    _top,
)


_LOOK_EVERY_S = 0.5  # whether the bridge is still there
_FIRST, _NEXT = 64, 256  # records that are copied at a time


def _tail_arguments(parser: Parser) -> None:
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


def _tail(arguments: argparse.Namespace) -> int:
    """Prints records until N were shown, the bridge or the reader is gone, or Ctrl-C."""
    from shmbridge.cli.base import to_reader
    from shmbridge.watch.observer import Observer

    show = _lines(arguments)
    follow = not arguments.no_follow
    with Observer(arguments.bridge, backlog=not arguments.new, follow=follow) as observer, to_reader():
        for record in itertools.islice(_records(observer, arguments), arguments.n):
            print("\n".join(show(record)), flush=True)
    return 0


def _records(observer: "Observer", arguments: argparse.Namespace) -> "Iterator[Record]":
    """Yields the wanted records; prints on standard error what cannot be shown."""
    from shmbridge.cli.base import has_reader
    from shmbridge.segments import bridge_names
    from shmbridge.watch.long_wait import LongWait
    from shmbridge.watch.observer import give_way
    from shmbridge.watch.text import printable

    printed: set[str] = set()
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
            if sentence not in printed:
                printed.add(sentence)
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
    from shmbridge.watch.snapshot import policy_version
    from shmbridge.watch.text import facts_of, line_of, rows_of, tokenizer_pieces

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


TAIL = Command(
    "print the records of a bridge as they come; takes none away",
    """examples:
  shmbridge tail run1                       a line per record: what is held, then what comes
  shmbridge tail run1 --env gsm8k --new     only that environment, only what comes from now on
  shmbridge tail run1 --rows -n 3           three records, a line per row
  shmbridge tail run1 --decode Qwen/Qwen3-8B    completions as text, with their step rewards
  shmbridge tail run1 --json | jq .group_id     one JSON object per record

It holds nothing back: records that were released before they could be copied are counted, on standard error.

exit codes: 0 shown; 3 no such bridge; 130 ended by Ctrl-C""",
    _tail_arguments,
    _tail,
)
