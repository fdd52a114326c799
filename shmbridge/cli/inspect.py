"""`shmbridge inspect`: what each bridge does, what is wrong with it, and the content of its lanes."""

import argparse
import contextlib
import sys
import time

import msgspec

from shmbridge.parser import Parser, bridge_name

HELP = "say what each bridge does and what is wrong with it, and list its lanes and weights"
EXAMPLES = """examples:
  shmbridge inspect                 all bridges
  shmbridge inspect run1            one bridge
  shmbridge inspect run1 --lanes    every lane, also of a bridge with many
  shmbridge inspect --seconds 5     rates over five seconds; 0: no rates, at once
  shmbridge inspect --json          for programs, at once
  shmbridge inspect --prometheus    once as Prometheus text, for a node exporter's text collector
  shmbridge inspect --listen 127.0.0.1:9400    serve /metrics and /healthz until Ctrl-C

exit codes: 0 shown; 1 cannot listen there; 3 no such bridge"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `inspect`."""
    parser.add_argument(
        "bridge", nargs="?", type=bridge_name, metavar="BRIDGE", help="one bridge; default: all"
    )
    parser.add_argument("--lanes", action="store_true", help="every lane, not only sums and troubles")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="time between the two looks that rates come from (0.5)"
    )
    parser.add_argument("--prometheus", action="store_true", help="print the counters as Prometheus text")
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="serve them to Prometheus, also of bridges that come later",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a block per bridge."""
    from shmbridge.segments.inventory import list_bridges
    from shmbridge.watch.snapshot import look
    from shmbridge.watch.text import block, document

    if arguments.prometheus or arguments.listen:
        return _export(arguments)
    wanted = [info for info in list_bridges() if arguments.bridge in (None, info.name)]
    if arguments.json:
        print(msgspec.json.encode([document(info) for info in wanted]).decode())
    elif not wanted:
        print(f"no bridge {arguments.bridge!r}" if arguments.bridge else "no bridges")
    else:
        before = {info.name: look(info.name) for info in wanted if arguments.seconds > 0}
        if any(each is not None and each.lanes for each in before.values()):
            time.sleep(arguments.seconds)
        print("\n\n".join(block(info, before.get(info.name), arguments.lanes) for info in wanted))
    return 0 if wanted or not arguments.bridge else 3


def _export(arguments: argparse.Namespace) -> int:
    """Prints Prometheus text once, or serves it until Ctrl-C."""
    from shmbridge.segments import segment
    from shmbridge.watch.prometheus import Exporter
    from shmbridge.watch.scrape import ScrapeServer

    def bridges() -> list[str]:
        return [name for name in segment.bridges() if arguments.bridge in (None, name)]

    exporter = Exporter(bridges)
    if not arguments.listen:
        if arguments.bridge and not bridges():
            print(f"no bridge {arguments.bridge!r}", file=sys.stderr)
            return 3
        print(exporter.text(), end="")
        return 0
    host, port = arguments.listen
    try:
        server = ScrapeServer((host, port), exporter)
    except OSError as wrong:
        print(f"cannot listen on {host}:{port}: {wrong.strerror} -> another --listen", file=sys.stderr)
        return 1
    with server:
        print(f"serving http://{host}:{server.server_port}/metrics until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:9400")
    return host or "127.0.0.1", int(port)
