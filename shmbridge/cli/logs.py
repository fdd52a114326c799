"""`shmbridge logs`: what the processes of a launch have logged, merged in the order of time."""

import argparse
import difflib
from dataclasses import asdict
from pathlib import Path

import msgspec

from shmbridge.parser import Parser
from shmbridge.program import refuse

HELP = "show the logs of a launch: one process', or all of them merged in the order of time"
EXAMPLES = """examples:
  shmbridge logs runs/run1                      all of them
  shmbridge logs runs/run1 learner              one
  shmbridge logs runs/run1 learner --follow     and what it goes on to say, until Ctrl-C
  shmbridge logs runs/run1 --level WARNING      what was not as it should be
  shmbridge logs runs/run1 --json               one object per line: time, name, level, text

RUN_DIR is the run_dir of the launch; the folder of `shmbridge demo` will do, too. A line that another
program has written, without a time, comes behind the line before it.

exit codes: 0 done; 2 there is no such run or log; 130 Ctrl-C"""
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `logs`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a process, such as learner [all]")
    parser.add_argument("--follow", "-f", action="store_true", help="go on with new lines, until Ctrl-C")
    parser.add_argument(
        "--level", choices=_LEVELS, help="lines of at least this level; leaves out lines that have none"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the lines."""
    from shmbridge.launch.logs import LogFile, followed, log_files, merged
    from shmbridge.watch.output import to_reader

    there = log_files(arguments.run_dir)
    if not there:
        refuse("shmbridge logs", f"no logs in {arguments.run_dir}", "give the run_dir of a launch")
        return 2
    for name in arguments.names:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=1) or [next(iter(there))]
            refuse("shmbridge logs", f"no log of {name!r}, but of {', '.join(there)}", f"take {close[0]}")
            return 2
    files = [LogFile(name, there[name]) for name in arguments.names or there]
    least = _LEVELS.index(arguments.level or _LEVELS[0])
    lines = (followed if arguments.follow else merged)(files)
    chosen = (
        line
        for line in lines
        if not arguments.level or (line.level is not None and _LEVELS.index(line.level) >= least)
    )
    with to_reader():
        for line in chosen:
            named = line.text if line.level or len(files) == 1 else f"{line.name}: {line.text}"
            print(msgspec.json.encode(asdict(line)).decode() if arguments.json else named, flush=True)
    return 0
