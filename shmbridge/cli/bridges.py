"""`shmbridge inspect` and `shmbridge clean`: what bridges do, and what dead processes left of them."""

import argparse
import contextlib
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from shmbridge.cli.base import (
    Command,
    Parser,
    add_host_name,
    amount,
    bridge_name,
    hint_if_unknown,
    refuse,
    report_none,
)
from shmbridge.segments import bridge_names

if TYPE_CHECKING:
    from shmbridge.segments import CleanReport
    from shmbridge.watch.exporter import Exporter

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")


def _inspect_arguments(parser: Parser) -> None:
    parser.add_argument(
        "bridge", nargs="?", type=bridge_name, metavar="BRIDGE", help="one bridge; default: all"
    )
    parser.add_argument("--lanes", action="store_true", help="every lane, not only sums and troubles")
    parser.add_argument(
        "--seconds", type=amount, default=0.5, help="time between the two looks that rates come from (0.5)"
    )
    parser.add_argument(
        "--ready",
        action="store_true",
        help="print nothing: exit code 0 if each bridge has a living consumer, else 4",
    )
    parser.add_argument("--prometheus", action="store_true", help="print the counters as Prometheus text")
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="serve them to Prometheus, also of bridges that come later",
    )
    add_host_name(parser, "with --listen: host name with a dot under which Prometheus asks")


def _inspect(arguments: argparse.Namespace) -> int:
    """Prints a block per bridge."""
    from shmbridge.cli.base import to_reader
    from shmbridge.config import check_bridge_name

    if arguments.bridge:
        check_bridge_name(arguments.bridge)
    if arguments.listen:
        return _serve(arguments)
    with to_reader():
        return _print_text(arguments) if arguments.prometheus else _inspect_once(arguments)
    return 0


def _inspect_once(arguments: argparse.Namespace) -> int:
    from shmbridge.segments import list_bridges
    from shmbridge.watch.snapshot import look
    from shmbridge.watch.text import block, of_listing

    wanted = [info for info in list_bridges() if arguments.bridge in (None, info.name)]
    if arguments.ready:
        return 0 if wanted and all(info.consumer_pid is not None for info in wanted) else 4
    if arguments.json:
        print(msgspec.json.encode([of_listing(info) for info in wanted]).decode())
    elif not wanted:
        report_none("shmbridge inspect", arguments.bridge)
    else:
        before = {info.name: look(info.name) for info in wanted if arguments.seconds > 0}
        if any(each is not None and (each.lanes or each.consumer) for each in before.values()):
            time.sleep(arguments.seconds)
        print("\n\n".join(block(info, before.get(info.name), arguments.lanes) for info in wanted))
    return 0 if wanted or not arguments.bridge else 3


def _exporter(wanted: str | None) -> "Exporter":
    from shmbridge.watch.exporter import Exporter

    return Exporter(lambda: [name for name in bridge_names() if wanted in (None, name)])


def _print_text(arguments: argparse.Namespace) -> int:
    """Prints Prometheus text once."""
    print(_exporter(arguments.bridge).text(), end="")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Serves Prometheus text until Ctrl-C."""
    from shmbridge.httpd.door import cannot_listen
    from shmbridge.watch.exporter import ScrapeServer

    host, port = arguments.listen
    try:
        server = ScrapeServer((host, port), _exporter(arguments.bridge), arguments.host_name)
    except OSError as wrong:
        refuse("shmbridge inspect", cannot_listen(host, port, wrong, "--listen"))
        return 1
    with server:
        print(f"serving {server.url}/metrics until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _address(text: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:9400 or [::1]:9400")
    return found["ipv6"] or found["host"] or "127.0.0.1", int(found["port"])


INSPECT = Command(
    "show what each bridge does and what is wrong with it, its lanes and weights",
    """examples:
  shmbridge inspect                 all bridges
  shmbridge inspect run1            one bridge
  shmbridge inspect run1 --lanes    every lane, also of a bridge with many
  shmbridge inspect --seconds 5     rates over five seconds; 0: no rates, at once
  shmbridge inspect --json          for programs, at once
  shmbridge inspect run1 --ready    nothing but the exit code: for the probes of Kubernetes and Compose
  shmbridge inspect --prometheus    once as Prometheus text, for a node exporter's text collector
  shmbridge inspect --listen 127.0.0.1:9400    serve /metrics and /healthz until Ctrl-C

exit codes: 0 shown, or ready; 1 cannot listen there; 3 no such bridge; 4 not ready""",
    _inspect_arguments,
    _inspect,
)


def _clean_arguments(parser: Parser) -> None:
    parser.add_argument(
        "bridge", nargs="?", type=bridge_name, metavar="BRIDGE", help="one bridge; default: all"
    )
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is touched")


def _clean(arguments: argparse.Namespace) -> int:
    """Prints which names were, or would be, removed, and which were kept and why."""
    from shmbridge.segments import clean

    report = clean(arguments.bridge, dry_run=not arguments.yes)
    if arguments.json:
        print(msgspec.json.encode(asdict(report)).decode())
        return _clean_code(arguments, report)
    word = "would remove" if report.dry_run else "removed"
    for name in report.removed:
        lost, trained = report.undelivered.get(name, 0), report.trained.get(name)
        what = f" with {lost} undelivered records" if lost else ""
        if trained is not None:
            what += f" with version {trained}, trained by a learner that was killed"
        print(f"{word} {name}{what}")
    for name, reason in report.kept.items():
        print(f"kept {name}: {reason}")
    if not report.removed and not report.kept:
        _print_nothing(arguments)
    elif report.dry_run and report.removed:
        print(
            "nothing was touched -> shmbridge clean "
            f"{arguments.bridge + ' ' if arguments.bridge else ''}--yes"
        )
    return _clean_code(arguments, report)


def _print_nothing(arguments: argparse.Namespace) -> None:
    """Says in one line that there was nothing to clean."""
    hint = hint_if_unknown(arguments.bridge) if arguments.bridge else ""
    if hint and not arguments.yes:
        refuse("shmbridge clean", f"no bridge {arguments.bridge!r}", hint)
    else:
        print("nothing to clean" + (f": no bridge {arguments.bridge!r} -> {hint}" if hint else ""))


def _clean_code(arguments: argparse.Namespace, report: "CleanReport") -> int:
    """Returns the exit code: what lives is an error only where it was to be removed, not in a timer's
    `clean --yes`; a bridge that does not exist, only where it was to be shown.
    """
    if arguments.bridge and report.kept:
        return 4
    asked = arguments.bridge if not (arguments.yes or report.removed) else None
    return 3 if asked and hint_if_unknown(asked) else 0


CLEAN = Command(
    "list what dead processes left in shared memory; with --yes, remove it",
    """examples:
  shmbridge clean              what would be removed, and what undelivered records it holds
  shmbridge clean run1 --yes   remove what is dead of bridge run1, undelivered records included

exit codes: 0 done, or nothing to do, also with --yes for a bridge that does not exist; 3 no such bridge;
4 BRIDGE is named, and something of it was kept, since it is alive""",
    _clean_arguments,
    _clean,
)
