"""`shmbridge clean`: lists and removes segments that no living process uses."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from shmbridge.cli.no_bridge import hint_if_unknown
from shmbridge.parser import Parser, bridge_name
from shmbridge.program import refuse

if TYPE_CHECKING:
    from shmbridge.segments import CleanReport

HELP = "list what dead processes left in shared memory; with --yes, remove it"
EXAMPLES = """examples:
  shmbridge clean              what would be removed, and what undelivered records it holds
  shmbridge clean run1 --yes   remove what is dead of bridge run1, undelivered records included

exit codes: 0 done, or nothing to do, also with --yes for a bridge that does not exist; 3 no such bridge;
4 BRIDGE is named, and something of it was kept, since it is alive"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `clean`."""
    parser.add_argument(
        "bridge", nargs="?", type=bridge_name, metavar="BRIDGE", help="one bridge; default: all"
    )
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is touched")


def run(arguments: argparse.Namespace) -> int:
    """Prints which names were, or would be, removed, and which were kept and why."""
    from shmbridge.segments import clean

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
        _say_nothing(arguments)
    elif report.dry_run and report.removed:
        print(
            "nothing was touched -> shmbridge clean "
            f"{arguments.bridge + ' ' if arguments.bridge else ''}--yes"
        )
    return _code(arguments, report)


def _say_nothing(arguments: argparse.Namespace) -> None:
    """Says in one line that there was nothing to clean."""
    hint = hint_if_unknown(arguments.bridge) if arguments.bridge else ""
    if hint and not arguments.yes:
        refuse("shmbridge clean", f"no bridge {arguments.bridge!r}", hint)
    else:
        print("nothing to clean" + (f": no bridge {arguments.bridge!r} -> {hint}" if hint else ""))


def _code(arguments: argparse.Namespace, report: "CleanReport") -> int:
    """Returns the exit code: what lives is an error only where it was to be removed, not in a timer's
    `clean --yes`; a bridge that does not exist, only where it was to be shown.
    """
    if arguments.bridge and report.kept:
        return 4
    asked = arguments.bridge if not (arguments.yes or report.removed) else None
    return 3 if asked and hint_if_unknown(asked) else 0
