"""`shmbridge clean`: lists and removes segments that no living process uses."""

import argparse
from dataclasses import asdict

import msgspec

HELP = "list what dead processes left in shared memory; with --yes, remove it"
EXAMPLES = """examples:
  shmbridge clean              what would be removed, and what undelivered records it holds
  shmbridge clean run1 --yes   remove what is dead of bridge run1, undelivered records included

exit codes: 0 done, or nothing to do; 4 something was kept because it is alive"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `clean`."""
    parser.add_argument("bridge", nargs="?", help="one bridge; default: all")
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is touched")


def run(arguments: argparse.Namespace) -> int:
    """Prints which names were, or would be, removed, and which were kept and why."""
    from shmbridge.segments.inventory import clean

    report = clean(arguments.bridge, dry_run=not arguments.yes)
    if arguments.json:
        print(msgspec.json.encode(asdict(report)).decode())
        return 4 if report.kept else 0
    word = "would remove" if report.dry_run else "removed"
    for name in report.removed:
        lost = report.undelivered.get(name, 0)
        print(f"{word} {name}" + (f" with {lost} undelivered records" if lost else ""))
    for name, reason in report.kept.items():
        print(f"kept {name}: {reason}")
    if not report.removed and not report.kept:
        print("nothing to clean")
    elif report.dry_run and report.removed:
        print(
            "nothing was touched -> shmbridge clean "
            f"{arguments.bridge + ' ' if arguments.bridge else ''}--yes"
        )
    return 4 if report.kept else 0
