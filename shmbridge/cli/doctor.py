"""`shmbridge doctor`: checks this host, and names a fix for what is wrong."""

import argparse
from dataclasses import asdict

import msgspec

from shmbridge.parser import Parser

HELP = "check this host: shared memory, limits, leaks, versions, kernel, GPU; a fix for what is wrong"
EXAMPLES = """examples:
  shmbridge doctor          a line per check
  shmbridge doctor --gpu    a GPU must be here; without it one is looked for if the system shows a sign of one
  shmbridge doctor --json   a list of name, state, text, fix, for probes

docs/how-to/doctor.md explains each line. Nothing is changed; what a check makes is gone when it ends.

exit codes: 0 all is well; 1 warnings; 2 something cannot run here"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `doctor`."""
    parser.add_argument("--gpu", action="store_true", help="fail if no GPU can be used")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per check, with a fix where one is needed."""
    from shmbridge.doctor import check, examination
    from shmbridge.watch.output import to_reader

    found = examination.examine(gpu_asked=arguments.gpu)
    with to_reader():
        if arguments.json:
            print(msgspec.json.encode([asdict(each) for each in found]).decode())
        else:
            width = max(len(each.name) for each in found)
            for each in found:
                line = f"{f'[{each.state}]':<6} {each.name:<{width}}  {each.text}"
                print(line + (f"  -> {each.fix}" if each.fix else ""))
    return check.exit_code(found)
