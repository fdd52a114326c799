"""`shmbridge inspect`: what each bridge does, what is wrong with it, and the content of its lanes."""

import argparse
import time

import msgspec

HELP = "say what each bridge does and what is wrong with it, and list its lanes and weights"
EXAMPLES = """examples:
  shmbridge inspect                 all bridges
  shmbridge inspect run1            one bridge
  shmbridge inspect run1 --lanes    every lane, also of a bridge with many
  shmbridge inspect --seconds 5     rates over five seconds; 0: no rates, at once
  shmbridge inspect --json          for programs, at once

exit codes: 0 shown; 3 no such bridge"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `inspect`."""
    parser.add_argument("bridge", nargs="?", help="one bridge; default: all")
    parser.add_argument("--lanes", action="store_true", help="every lane, not only sums and troubles")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="time between the two looks that rates come from (0.5)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a block per bridge."""
    from shmbridge.segments.inventory import list_bridges
    from shmbridge.watch.snapshot import look
    from shmbridge.watch.text import block, document

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
