"""`shmbridge top`: the live view of a bridge; or one plain screen, or JSON, for scripts."""

import argparse
import contextlib
import sys
import time

import msgspec

from shmbridge.cli.no_bridge import say_none
from shmbridge.config import parse_duration
from shmbridge.extras import install
from shmbridge.parser import Parser, bridge_name
from shmbridge.program import refuse

HELP = "watch a bridge live: what is wrong, the consumer, every lane, its newest record"
EXAMPLES = """examples:
  shmbridge top                   the only bridge, or one to choose
  shmbridge top run1              keys: q quit, p pause, s sort, g group, / filter, Enter record, ? help
  shmbridge top run1 --decode Qwen/Qwen3-0.6B    records as text; a local tokenizer, or a tokenizer.json
  shmbridge top run1 --once       one plain screen, as inspect; also where there is no terminal
  shmbridge top run1 --json       a JSON line per interval; with --once, one

  shmbridge top run1 --cluster    the relays of a Ray cluster, one line a node; with --once, once

The live view needs textual: pip install "shmbridge[tui]". --once and --json do not.

exit codes: 0 shown; 1 the live view cannot run here, no relay answers; 2 wrong arguments; 3 no such bridge"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `top`."""
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


def run(arguments: argparse.Namespace) -> int:
    """Shows the bridge until the user quits, or once."""
    from shmbridge.segments import bridge_names
    from shmbridge.watch.output import to_reader

    if arguments.cluster:
        return _cluster(arguments)
    wanted = [name for name in bridge_names() if arguments.bridge in (None, name)]
    if not wanted:
        if not arguments.json:
            say_none("shmbridge top", arguments.bridge)
        return 3 if arguments.bridge else 0
    if arguments.json or arguments.once or not _is_terminal():
        with to_reader():
            (_json if arguments.json else _once)(wanted, arguments.interval, arguments.once)
        return 0
    return _live(wanted[0] if len(wanted) == 1 else None, arguments.interval, arguments.decode)


def _cluster(arguments: argparse.Namespace) -> int:
    """Shows the relays until the user ends it, or once."""
    from shmbridge.extras import require

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
        from shmbridge.tui.top import Top
        from shmbridge.watch.decode import tokenizer_pieces
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
    from shmbridge.watch.document import of_look
    from shmbridge.watch.snapshot import look

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
