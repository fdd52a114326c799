"""`shmbridge clean`: lists and removes segments that no living process uses."""

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from shmbridge.cli.no_bridge import nearest_bridge
from shmbridge.parser import Parser, bridge_name

if TYPE_CHECKING:
    from shmbridge.segments.inventory import CleanReport

HELP = "list what dead processes left in shared memory; with --yes, remove it"
EXAMPLES = """examples:
  shmbridge clean              what would be removed, and what undelivered records it holds
  shmbridge clean run1 --yes   remove what is dead of bridge run1, undelivered records included

exit codes: 0 done, or nothing to do; 4 BRIDGE is named, and something of it was kept, since it is alive"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `clean`."""
    parser.add_argument(
        "bridge", nargs="?", type=bridge_name, metavar="BRIDGE", help="one bridge; default: all"
    )
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is touched")


def run(arguments: argparse.Namespace) -> int:
    """Prints which names were, or would be, removed, and which were kept and why."""
    from shmbridge.segments.inventory import clean

    report = clean(arguments.bridge, dry_run=not arguments.yes)
    if arguments.json:
        print(msgspec.json.encode(asdict(report)).decode())
        return _code(arguments, report)
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
        print("nothing to clean")
        _suggest(arguments.bridge)
    elif report.dry_run and report.removed:
        print(
            "nothing was touched -> shmbridge clean "
            f"{arguments.bridge + ' ' if arguments.bridge else ''}--yes"
        )
    return _code(arguments, report)


def _code(arguments: argparse.Namespace, report: "CleanReport") -> int:
    """Returns the exit code: what lives is an error only where it was to be removed, not in a timer's
    `clean --yes`.
    """
    return 4 if arguments.bridge and report.kept else 0


def _suggest(bridge: str | None) -> None:
    """Names the bridge that was probably meant, on standard error."""
    from shmbridge.segments.segment import bridges

    if bridge and (near := nearest_bridge(bridge, bridges())):
        print(f"no bridge {bridge!r} -> did you mean {near}?", file=sys.stderr)
